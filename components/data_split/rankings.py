"""Ranked answers: several responses to a prompt, from which one pair is made."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any


def pair(row: dict[str, object]) -> dict[str, object] | str:
    """Returns `{prompt, chosen, rejected}`, or the reason why no pair can be made.

    The best response is preferred to one of those below it, which the row's content draws: the rule of the binarized
    UltraFeedback that Zephyr was trained with (Tunstall et al. 2023, arXiv:2310.16944), whose authors draw and do not
    take the worst so that pairs are diverse and harder to tell apart. Without scores, the first is the best.

    Args:
        row: `prompt`, `responses`, and `scores` or not.
    """
    responses = row["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        return "responses is not a list of at least two"
    scores = row.get("scores")
    if scores is None:
        best, lower = 0, [at for at in range(1, len(responses)) if responses[at] != responses[0]]
    else:
        numbers = _numbers(scores, len(responses))
        if isinstance(numbers, str):
            return numbers
        best = max(range(len(numbers)), key=lambda at: numbers[at])  # the first of those that are level
        lower = [at for at, number in enumerate(numbers) if number < numbers[best] and responses[at] != responses[best]]
    if not lower:
        return "no response is better than another"
    content = json.dumps([row["prompt"], responses], sort_keys=True, default=str)
    drawn = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
    return {"prompt": row["prompt"], "chosen": responses[best], "rejected": responses[lower[drawn % len(lower)]]}


def _numbers(scores: Any, count: int) -> list[float] | str:
    if not isinstance(scores, list) or len(scores) != count:
        return f"scores is not a list of {count}, one for each response"
    try:
        numbers = [float(score) for score in scores]
    except (TypeError, ValueError, OverflowError):
        return "scores are not numbers"
    return "scores are not numbers" if any(math.isnan(number) for number in numbers) else numbers
