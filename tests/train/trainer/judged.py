"""Reward functions that note what they were given."""

from __future__ import annotations

from typing import Any

calls: list[dict[str, Any]] = []


def noted(prompts: list[Any], completions: list[Any], **others: Any) -> list[float]:
    """Notes its arguments; no two completions are likely to have the same reward."""
    calls.append({"prompts": prompts, "completions": completions, **others})
    return [float(sum(ids)) for ids in others["completion_ids"]]


async def awaited(prompts: list[Any], completions: list[Any], **others: Any) -> list[float]:
    """Does the same while others do, too."""
    return noted(prompts, completions, **others)
