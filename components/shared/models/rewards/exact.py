"""1 for a completion that is the answer, white space at its ends aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.components.shared.models import rewards


def make(right: float = 1.0, wrong: float = 0.0, ignore_case: bool = False) -> Callable[..., list[float]]:
    """Returns the function.

    Args:
        right: Reward of the answer.
        wrong: Reward of anything else.
        ignore_case: Whether capital and small letters are the same.
    """

    def plain(value: str) -> str:
        return value.strip().casefold() if ignore_case else value.strip()

    def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [right if plain(rewards.text(completion)) == plain(truth) else wrong for completion, truth in pairs]

    return exact
