"""1 for a completion that has a given form."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.models import rewards

THINK = r"<think>.*?</think>\s*\S.*"
"""Thinking between tags, then something said."""


def make(pattern: str = THINK, right: float = 1.0, wrong: float = 0.0) -> Callable[..., list[float]]:
    """Returns the function.

    Args:
        pattern: Regular expression that the whole completion must match; a dot also stands for a line's end.
        right: Reward where it does.
        wrong: Reward where it does not.

    Raises:
        UserError: the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"reward 'format': pattern {pattern!r} is no regular expression: {error}.") from None

    def format(completions: list[Any], **_: Any) -> list[float]:
        return [right if compiled.fullmatch(rewards.text(completion).strip()) else wrong for completion in completions]

    return format
