"""1 for a completion whose final number is that of the answer, as in GSM8K."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from baton.components.shared.models import rewards

_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?\d[\d,]*(?:\.\d+)?")
"""A dash after a letter, digit or bracket is no sign: `10-18` ends on 18."""


def make(right: float = 1.0, wrong: float = 0.0, mark: str = "####") -> Callable[..., list[float]]:
    """Returns the function.

    Args:
        right: Reward of a right number.
        wrong: Reward of anything else.
        mark: What the final number stands after; where it is missing, the last number counts.
    """

    def numeric(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [
            right if (value := number(rewards.text(completion), mark)) is not None and value == number(truth, mark)
            else wrong
            for completion, truth in pairs
        ]  # fmt: skip

    return numeric


def number(text: str, mark: str = "####") -> Decimal | None:
    """Returns the number a text ends on: the first after the last mark, else the last one, or None."""
    _, separator, tail = text.rpartition(mark)
    numbers = _NUMBER.findall(tail) if separator else _NUMBER.findall(text)
    if not numbers:
        return None
    chosen = numbers[0] if separator else numbers[-1]
    try:
        return Decimal(chosen.replace(",", "").replace("$", "")).normalize()
    except InvalidOperation:
        return None
