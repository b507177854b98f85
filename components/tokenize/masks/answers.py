"""A prompt with one of its answers, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Ids = list[int]


@dataclass(frozen=True)
class Answer:
    """A prompt with one of its answers.

    Attributes:
        ids: Tokens of both.
        length: How many of them are the prompt's.
    """

    ids: Ids
    length: int

    @property
    def prompt(self) -> Ids:
        """Tokens of the prompt."""
        return self.ids[: self.length]

    @property
    def answer(self) -> Ids:
        """Tokens of the answer."""
        return self.ids[self.length :]


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Returns how many elements two lists share from the start."""
    if b[: len(a)] == a:
        return len(a)
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
