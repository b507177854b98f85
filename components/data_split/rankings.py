"""Ranked answers: several responses to a prompt, from which one pair is made."""

from __future__ import annotations

import hashlib
import json
import math
import re

from baton.components.data_split.conversations import shared_length
from baton.components.data_split.rows import loads

TEXTS = ("text", "response", "answer", "completion", "output", "content", "summary")
SCORES = ("score", "overall_score", "pm_score", "rating", "reward")
"""What the parts of a response are called that is a mapping: its text, and how good it is. `rank` is best at 1."""

LEVEL = ("tie", "both", "neither", "none", "equal", "same", "draw")
"""How a word begins that prefers no response."""


def pair(row: dict[str, object], names: list[str] | None = None) -> dict[str, object] | str:
    """Returns `{prompt, chosen, rejected}`, or the reason why no pair can be made.

    The best response is preferred to one of those below it, which the row's content draws: the rule of the binarized
    UltraFeedback that Zephyr was trained with (Tunstall et al. 2023, arXiv:2310.16944), whose authors draw and do not
    take the worst so that pairs are diverse and harder to tell apart. Without scores, the first is the best.

    Args:
        row: `responses`, `prompt` unless they begin with it, and one of `scores`, `ranks` (1 is best), `preferred` (the
            best one's name) and `margin` (of two; below 0 the first is better), or none of them where they are listed
            with the best first.
        names: The responses' columns, where they stand side by side.
    """
    responses = row["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        return "responses is not a list of at least two"
    if all(isinstance(each, dict) and not {"role", "from"} & each.keys() for each in responses):
        row = row | _parts(responses)
        responses = row["responses"]
        if not isinstance(responses, list):
            return f"responses are mappings without {' or '.join(TEXTS)}"
    if names and (conversations := _written_turns(row.get("prompt"), responses)):
        row, responses = {**row, "prompt": None}, conversations
    numbers = _goodness(row, names or [str(at) for at in range(len(responses))])
    if isinstance(numbers, str):
        return numbers
    if numbers is None:
        if names:
            return "nothing says which of the responses is better (scores, ranks, preferred or margin)"
        best, lower = 0, [at for at in range(1, len(responses)) if responses[at] != responses[0]]
    else:
        best = max(range(len(numbers)), key=lambda at: numbers[at])  # the first of those that are level
        lower = [at for at, number in enumerate(numbers) if number < numbers[best] and responses[at] != responses[best]]
    if not lower:
        return "no response is better than another"
    prompt = row.get("prompt")
    content = json.dumps([prompt, responses], sort_keys=True, default=str)
    drawn = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
    answers = {"chosen": responses[best], "rejected": responses[lower[drawn % len(lower)]]}
    return answers if prompt is None else {"prompt": prompt, **answers}


def _parts(responses: list[dict[str, object]]) -> dict[str, object]:
    """Returns `responses`, which all must have, and `scores` or `ranks`, of responses that are mappings."""
    row: dict[str, object] = {"responses": None}
    for ours, names in (("responses", TEXTS), ("scores", SCORES), ("ranks", ("rank",))):
        for name in reversed(names):
            values = [response.get(name) for response in responses]
            # One without a score is not taken for a list with the best first.
            if None not in values or (ours != "responses" and any(value is not None for value in values)):
                row[ours] = values
    return row


def _written_turns(prompt: object, responses: list[object]) -> list[object] | None:
    """Returns whole conversations where prompt and responses are each the JSON of a list, a text for each turn."""
    values = [prompt, *responses]
    if not all(isinstance(value, str) and value.startswith("[") for value in values):
        return None
    try:
        asked, *answers = (loads(str(value)) for value in values)
    except ValueError:
        return None
    if any(len(turns) != len(asked) or not all(isinstance(turn, str) for turn in turns) for turns in (asked, *answers)):
        return None
    return [
        [
            {"role": role, "content": text}
            for question, answer in zip(asked, turns, strict=True)
            for role, text in (("user", question), ("assistant", answer))
        ]
        for turns in answers
    ]


def _goodness(row: dict[str, object], names: list[str]) -> list[float] | str | None:
    """Returns a number for each response, higher for a better one; a reason why there is none, None without a word."""
    for ours, sign in (("scores", 1), ("ranks", -1)):
        if row.get(ours) is not None:
            numbers = _numbers(row[ours], len(names), ours)
            return numbers if isinstance(numbers, str) else [sign * number for number in numbers]
    if row.get("preferred") is not None:
        return _preferred(row["preferred"], names)
    if row.get("margin") is not None:
        margin = _numbers([row["margin"]], 1, "margin")
        if isinstance(margin, str) or len(names) == 2:
            return margin if isinstance(margin, str) else [-margin[0], margin[0]]
        return "margin is between two responses"
    return None


def _preferred(value: object, names: list[str]) -> list[float] | str:
    """Returns 1 for the response that is named by its column or what that ends in (`model_b` for `response_b`)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    word = str(value).strip().lower()
    if not word or word.startswith(LEVEL):
        return "no response is better than another"
    lowered = [name.lower() for name in names]
    shared = shared_length(min(lowered), max(lowered))
    ends = [name[shared:] for name in lowered]
    # `B`, `model_b` and `assistant 2` name the one that ends so; a word that merely has that last letter does not.
    named = [
        at
        for at, (name, end) in enumerate(zip(lowered, ends, strict=True))
        if word in (name, end) or re.search(rf"[^a-z0-9]{re.escape(end)}$", word)
    ]
    if len(named) != 1:
        return f"preferred is {value!r}, expected one of {', '.join(names)}"
    return [float(at == named[0]) for at in range(len(names))]


def _numbers(values: object, count: int, name: str) -> list[float] | str:
    if not isinstance(values, list) or len(values) != count:
        return f"{name} is not a list of {count}, one for each response"
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        return f"{name} are not numbers"
    return f"{name} are not numbers" if any(math.isnan(number) for number in numbers) else numbers
