"""Conversations: pairs with and without a prompt, prompts alone, and what is wrong with the others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data_split import formats
from components.shared.recipe import Data

DATA = Data(source=["rows.jsonl"])
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "1+1?"}
AGAIN = {"role": "user", "content": "Sure?"}
RIGHT = {"role": "assistant", "content": "2"}
WRONG = {"role": "assistant", "content": "3"}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}


def pair(prompt: list[Any], chosen: list[Any], rejected: list[Any]) -> dict[str, list[Any]]:
    """A row that came out."""
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


PAIRS = {
    "whole conversations": ({"chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]}, pair([ASK], [RIGHT], [WRONG])),
    "with a system message": (
        {"chosen": [SYSTEM, ASK, RIGHT], "rejected": [SYSTEM, ASK, WRONG]},
        pair([SYSTEM, ASK], [RIGHT], [WRONG]),
    ),
    "several turns shared": (
        {"chosen": [ASK, RIGHT, AGAIN, YES], "rejected": [ASK, RIGHT, AGAIN, NO]},
        pair([ASK, RIGHT, AGAIN], [YES], [NO]),
    ),
    "parting at an earlier turn": (
        {"chosen": [ASK, RIGHT, AGAIN, YES], "rejected": [ASK, WRONG, AGAIN, NO]},
        pair([ASK], [RIGHT, AGAIN, YES], [WRONG, AGAIN, NO]),
    ),
    "a prompt of messages": ({"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]}, pair([ASK], [RIGHT], [WRONG])),
    "a prompt that both repeat": (
        {"prompt": [ASK], "chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]},
        pair([ASK], [RIGHT], [WRONG]),
    ),
    "a prompt that one repeats": (
        {"prompt": [ASK], "chosen": [ASK, RIGHT], "rejected": [WRONG]},
        pair([ASK], [RIGHT], [WRONG]),
    ),
    "a prompt in words": ({"prompt": "1+1?", "chosen": [RIGHT], "rejected": [WRONG]}, pair([ASK], [RIGHT], [WRONG])),
    "a prompt in words that both repeat": (
        {"prompt": "1+1?", "chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]},
        pair([ASK], [RIGHT], [WRONG]),
    ),
    "further keys": (
        {"chosen": [{**ASK, "name": "x"}, RIGHT], "rejected": [ASK, {**WRONG, "score": 1}], "id": 4},
        pair([ASK], [RIGHT], [WRONG]),
    ),
}


@pytest.mark.parametrize(("row", "expected"), PAIRS.values(), ids=PAIRS)
def test_a_pair(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert formats.normalise(row, DATA, "preference") == expected


SAME = "chosen and rejected are the same"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing shared": (
        {"chosen": [RIGHT], "rejected": [WRONG]},
        "chosen and rejected share no first message, and there is no prompt",
    ),
    "one goes on where the other ends": (
        {"chosen": [ASK, RIGHT, AGAIN, YES], "rejected": [ASK, RIGHT]},
        "rejected does not end on an assistant turn",
    ),
    "the same": ({"chosen": [ASK, RIGHT], "rejected": [ASK, RIGHT]}, "chosen does not end on an assistant turn"),
    "the same behind a prompt": ({"prompt": [ASK], "chosen": [RIGHT], "rejected": [RIGHT]}, SAME),
    "ends on a question": (
        {"prompt": [ASK], "chosen": [RIGHT, AGAIN], "rejected": [WRONG]},
        "chosen does not end on an assistant turn",
    ),
    "one side is text": (
        {"prompt": [ASK], "chosen": [RIGHT], "rejected": "3"},
        "rejected is a str, expected a non-empty list",
    ),
    "one side is empty": (
        {"prompt": [ASK], "chosen": [], "rejected": [WRONG]},
        "chosen is a list, expected a non-empty list",
    ),
    "an empty prompt": (
        {"prompt": [], "chosen": [RIGHT], "rejected": [WRONG]},
        "prompt is a list, expected a non-empty list",
    ),
    "a prompt that is a number": (
        {"prompt": 5, "chosen": [RIGHT], "rejected": [WRONG]},
        "prompt is a int, expected a non-empty list",
    ),
    "no content": ({"chosen": [ASK, {"role": "assistant"}], "rejected": [ASK, WRONG]}, "message 2 has no text content"),
    "prompt surrogate": (
        {"prompt": "\ud800", "chosen": [RIGHT], "rejected": [WRONG]},
        "message 1 has no text content",
    ),
}


@pytest.mark.parametrize(("row", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_pair_that_cannot_be_used(row: dict[str, Any], reason: str) -> None:
    assert formats.normalise(row, DATA, "preference") == reason


def test_a_prompt_of_several_turns() -> None:
    row = {"prompt": [SYSTEM, ASK, RIGHT, AGAIN], "answer": "Yes.", "id": 1}
    assert formats.normalise(row, DATA, "prompt") == {"prompt": [SYSTEM, ASK, RIGHT, AGAIN], "answer": "Yes."}


PROMPTS = {
    "ends on an answer": ({"prompt": [ASK, RIGHT]}, "prompt ends on an assistant turn"),
    "empty": ({"prompt": []}, "prompt is a list, expected a non-empty list"),
    "no role": ({"prompt": [{"content": "x"}]}, "message 1 has no role"),
    "answer surrogate": ({"prompt": [ASK], "answer": "\ud800"}, "column 'answer' holds a lone surrogate"),
}


@pytest.mark.parametrize(("row", "reason"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_that_cannot_be_used(row: dict[str, Any], reason: str) -> None:
    assert formats.normalise(row, DATA, "prompt") == reason


MESSAGES = st.lists(st.sampled_from([SYSTEM, ASK, AGAIN, RIGHT, WRONG, YES, NO]), min_size=1, max_size=5)


@given(chosen=MESSAGES, rejected=MESSAGES, prompt=st.none() | MESSAGES)
def test_a_pair_is_cut_where_its_sides_part(chosen: list[Any], rejected: list[Any], prompt: list[Any] | None) -> None:
    row = {"chosen": chosen, "rejected": rejected, **({"prompt": prompt} if prompt else {})}
    found = formats.normalise(row, DATA, "preference")
    if isinstance(found, str):
        return
    assert found["chosen"] != found["rejected"]
    assert found["chosen"][-1]["role"] == found["rejected"][-1]["role"] == "assistant"
    for side, given_side in (("chosen", chosen), ("rejected", rejected)):
        assert given_side in (found["prompt"] + found[side], found[side])
    if prompt is None:
        assert found["chosen"][0] != found["rejected"][0], "what both begin with is the prompt"
