"""A reward that no two completions are likely to share."""

from __future__ import annotations

from typing import Any


def mean_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Returns each completion's mean token, in hundreds."""
    return [sum(ids) / len(ids) / 100 if ids else 0.0 for ids in completion_ids]
