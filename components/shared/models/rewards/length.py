"""1 for a completion of the wished length, falling to 0 with the distance from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make(target: int = 100, width: int | None = None) -> Callable[..., list[float]]:
    """Returns the function.

    Args:
        target: Wished length in tokens.
        width: Distance at which the reward is 0; `target` when left out.
    """
    reach = width or target

    def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [max(0.0, 1.0 - abs(len(ids) - target) / reach) for ids in completion_ids]

    return length
