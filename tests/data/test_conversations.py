"""Conversations: pairs with and without a prompt, prompts alone, and what is wrong with the others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.data import schema
from baton.data.schema import ColumnMapping
from baton.recipe import load
from baton.recipe.data import DataSource
from tests.data.splitting import normalized

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
    "answers that are texts": ({"prompt": [ASK], "chosen": "2", "rejected": "3"}, pair([ASK], [RIGHT], [WRONG])),
    "answers that are one message each": (
        {"prompt": [ASK], "chosen": RIGHT, "rejected": WRONG},
        pair([ASK], [RIGHT], [WRONG]),
    ),
    "ShareGPT's words": (
        {
            "prompt": [{"from": "human", "value": "1+1?"}],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3"},
        },
        pair([ASK], [RIGHT], [WRONG]),
    ),
    "further keys": (
        {"chosen": [{**ASK, "name": "x"}, RIGHT], "rejected": [ASK, {**WRONG, "score": 1}], "id": 4},
        pair([{**ASK, "name": "x"}], [RIGHT], [WRONG]),
    ),
}


@pytest.mark.parametrize(("row", "expected"), PAIRS.values(), ids=PAIRS)
def test_a_pair(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert normalized(row, ColumnMapping(format="preference", columns={})) == expected


SAID = {
    "roles": ([ASK, RIGHT], [ASK, RIGHT]),
    "ShareGPT": (
        [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "1+1?"},
            {"from": "gpt", "value": "2", "weight": 1},
        ],
        [SYSTEM, ASK, {**RIGHT, "train": True}],
    ),
    "other names": ([{"role": "Human", "content": "1+1?"}, {"role": "model", "content": "2"}], [ASK, RIGHT]),
    "tools in words": (
        [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": "add(1, 1)"},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2"},
        ],
        [ASK, {"role": "assistant", "content": "add(1, 1)"}, {"role": "tool", "content": "2"}, RIGHT],
    ),
    "an own role": ([{"role": "narrator", "content": "Once"}, RIGHT], [{"role": "narrator", "content": "Once"}, RIGHT]),
    "parts of text": (
        [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]}, RIGHT],
        [ASK, RIGHT],
    ),
    "no calls": ([ASK, {**RIGHT, "tool_calls": [], "function_call": None}], [ASK, RIGHT]),
    "parts with an image": (
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "text": "y"}]}, RIGHT],
        "message 1 has a part of type 'image', and only text is learned",
    ),
    "parts without text": ([{"role": "user", "content": []}, RIGHT], "message 1 has no text content"),
    "tool calls": (
        [ASK, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, RIGHT],
        "message 2 has tool_calls that are not JSON of a name and arguments",
    ),
    "a speaker nobody knows": (
        [{"from": "alien", "value": "x"}, {"from": "gpt", "value": "y"}],
        "message 1 is from 'alien', expected user, human, assistant, gpt, chatgpt, bing, bard, model, bot, "
        "function_call, system, tool, function, observation",
    ),
    "no value": ([{"from": "human"}, RIGHT], "message 1 has no text content"),
}


@pytest.mark.parametrize("row_format", ["messages", "sharegpt"])
@pytest.mark.parametrize(("messages", "expected"), SAID.values(), ids=SAID)
def test_who_says_what(messages: list[Any], expected: list[Any] | str, row_format: str) -> None:
    name = "messages" if row_format == "messages" else "conversations"
    found = normalized({name: messages}, ColumnMapping(format=row_format, columns={}))
    assert found == (expected if isinstance(expected, str) else {"messages": expected})


def test_rows_in_a_list_are_no_messages() -> None:
    rows = {"data": [{"prompt": "1+1?", "completion": "2"}]}
    found = normalized(rows, of_method("sft", rows))
    assert found == (
        "message 1 has no role but prompt, completion; if the list holds rows, write each on a line of its own"
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing shared": (
        {"chosen": [RIGHT], "rejected": [WRONG]},
        "chosen and rejected share no first message, and there is no prompt",
    ),
    "one message each and nothing before": (
        {"chosen": RIGHT, "rejected": WRONG},
        "chosen and rejected share no first message, and there is no prompt",
    ),
    "one goes on where the other ends": (
        {"chosen": [ASK, RIGHT, AGAIN, YES], "rejected": [ASK, RIGHT]},
        "rejected does not end on an assistant turn",
    ),
    "ends on a question": (
        {"prompt": [ASK], "chosen": [RIGHT, AGAIN], "rejected": [WRONG]},
        "chosen does not end on an assistant turn",
    ),
    "one side is text and there is no prompt": (
        {"chosen": [ASK, RIGHT], "rejected": "3"},
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
    assert normalized(row, ColumnMapping(format="preference", columns={})) == reason


def test_a_prompt_of_several_turns() -> None:
    row = {"prompt": [SYSTEM, ASK, RIGHT, AGAIN], "answer": "Yes.", "id": 1}
    assert normalized(row, ColumnMapping(format="prompt", columns={})) == {
        "prompt": [SYSTEM, ASK, RIGHT, AGAIN],
        "answer": "Yes.",
    }


PROMPTS = {
    "ends on an answer": ({"prompt": [ASK, RIGHT]}, "prompt ends on an assistant turn"),
    "empty": ({"prompt": []}, "prompt is a list, expected a non-empty list"),
    "no role": ({"prompt": [{"content": "x"}]}, "message 1 has no role"),
    "answer surrogate": ({"prompt": [ASK], "answer": "\ud800"}, "column 'answer' holds a lone surrogate"),
}


@pytest.mark.parametrize(("row", "reason"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_that_cannot_be_used(row: dict[str, Any], reason: str) -> None:
    assert normalized(row, ColumnMapping(format="prompt", columns={})) == reason


HH = "\n\nHuman: 1+1?\n\nAssistant: 3\n\nHuman: Sure?\n\nAssistant:"
TEXTS = {
    "turns": (HH + " No.", HH + " Yes.", HH),
    "turns whose answers begin alike": (HH + " I do not know", HH + " I do not think so", HH),
    "first words": ("One and one are two", "One and one are six", "One and one are"),
    "the same first letters": ("It is thirty", "It is three", "It is"),
    "lines": ("Q: 1+1?\nA: 2", "Q: 1+1?\nA: 3", "Q: 1+1?\nA:"),
    "one is the other's beginning": ("One and one", "One and one are two", "One and"),
    "the same": ("It is two", "It is two", "It is"),
}


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), TEXTS.values(), ids=TEXTS)
def test_texts_that_share_their_prompt(chosen: str, rejected: str, prompt: str) -> None:
    found = normalized({"chosen": chosen, "rejected": rejected}, ColumnMapping(format="preference", columns={}))

    assert found == {"prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}


@pytest.mark.parametrize("name", ["turns", "first words", "lines"])
def test_the_prompt_is_the_one_that_trl_takes_out(name: str) -> None:
    trl = pytest.importorskip("trl")
    pair = dict(zip(("chosen", "rejected"), TEXTS[name][:2], strict=True))

    assert normalized(dict(pair), ColumnMapping(format="preference", columns={})) == trl.extract_prompt(pair)


SAYING = st.text("ab \n", max_size=12)


@given(prompt=st.sampled_from(["", HH, "One and "]) | SAYING, chosen=SAYING, rejected=SAYING)
def test_nothing_of_a_text_is_lost(prompt: str, chosen: str, rejected: str) -> None:
    row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    found = normalized(dict(row), ColumnMapping(format="preference", columns={}))
    if isinstance(found, dict):
        assert {side: found["prompt"] + found[side] for side in row} == row


MESSAGES = st.lists(st.sampled_from([SYSTEM, ASK, AGAIN, RIGHT, WRONG, YES, NO]), min_size=1, max_size=5)


@given(chosen=MESSAGES, rejected=MESSAGES, prompt=st.none() | MESSAGES)
def test_a_pair_is_cut_where_its_sides_part(chosen: list[Any], rejected: list[Any], prompt: list[Any] | None) -> None:
    row = {"chosen": chosen, "rejected": rejected, **({"prompt": prompt} if prompt else {})}
    found = normalized(row, ColumnMapping(format="preference", columns={}))
    if isinstance(found, str):
        return
    assert found["chosen"][-1]["role"] == found["rejected"][-1]["role"] == "assistant"
    for side, given_side in (("chosen", chosen), ("rejected", rejected)):
        assert given_side in (found["prompt"] + found[side], found[side])
    if prompt is None and chosen != rejected:
        assert found["chosen"][0] != found["rejected"][0], "what both begin with is the prompt"


@pytest.mark.parametrize("prompt", [{}, {"prompt": [ASK]}])
def test_answers_that_are_the_same_are_left_to_the_check_of_quality(prompt: dict[str, Any]) -> None:
    head = [] if prompt else [ASK]
    row = {**prompt, "chosen": [*head, RIGHT], "rejected": [*head, RIGHT]}
    found = normalized(row, ColumnMapping(format="preference", columns={}))
    assert found == {"prompt": [ASK], "chosen": [RIGHT], "rejected": [RIGHT]}


ROUND = [ASK, RIGHT]
IN_ROUNDS: dict[str, tuple[Any, Any]] = {
    "questions and answers": ([{"input": "1+1?", "output": "2"}] * 2, [*ROUND, *ROUND]),
    "the system's message in the first": (
        [{"system": "Be brief.", "input": "1+1?", "output": "2"}, {"input": "1+1?", "output": "2"}],
        [SYSTEM, *ROUND, *ROUND],
    ),
    "the system's message in a later one": (
        [{"input": "1+1?", "output": "2"}, {"system": "Be brief.", "input": "1+1?", "output": "2"}],
        [*ROUND, SYSTEM, *ROUND],
    ),
    "an empty one": ([{"system": " ", "input": "1+1?", "output": "2"}], ROUND),
    "an answer that is not learned": (
        [{"input": "1+1?", "output": "2", "output_with_loss": False}, {"input": "1+1?", "output": "2"}],
        [ASK, {**RIGHT, "train": False}, *ROUND],
    ),
}


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_rounds_of_a_conversation(name: str) -> None:
    rounds, expected = IN_ROUNDS[name]
    found = normalized(
        {"conversation": rounds}, ColumnMapping(format="sharegpt", columns={"conversations": "conversation"})
    )
    assert found == {"messages": expected}


EARLIER: dict[str, tuple[str, dict[str, Any], dict[str, Any] | str]] = {
    "instruction": (
        "sft",
        {"instruction": "1+1?", "input": "Count.", "output": "2", "history": [["1+1?", "2"]]},
        {"prompt": [*ROUND, {**ASK, "content": "1+1?\n\nCount."}], "completion": [RIGHT]},
    ),
    "instruction with a system message": (
        "sft",
        {"instruction": "1+1?", "input": "", "output": "2", "system": "Be brief.", "history": [["1+1?", "2"]]},
        {"prompt": [SYSTEM, *ROUND, ASK], "completion": [RIGHT]},
    ),
    "query and response": (
        "sft",
        {"query": "1+1?", "response": "2", "history": [["1+1?", "2"], ["1+1?", "2"]]},
        {"prompt": [*ROUND, *ROUND, ASK], "completion": [RIGHT]},
    ),
    "pairs": (
        "dpo",
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "history": [["1+1?", "2"]]},
        pair([*ROUND, ASK], [RIGHT], [WRONG]),
    ),
    "rated": (
        "kto",
        {"prompt": "1+1?", "completion": "2", "label": True, "history": [["1+1?", "2"]]},
        {"prompt": [*ROUND, ASK], "completion": [RIGHT], "label": True},
    ),
    "prompts": ("grpo", {"prompt": "1+1?", "history": [["1+1?", "2"]]}, {"prompt": [*ROUND, ASK]}),
    "messages": ("grpo", {"prompt": "1+1?", "history": ROUND}, {"prompt": [*ROUND, ASK]}),
    "of words": (
        "sft",
        {"instruction": "1+1?", "output": "2", "history": ["x"]},
        "column 'history' is not a list of questions and their answers",
    ),
}


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_rounds_are_part_of_the_conversation(name: str) -> None:
    method, row, expected = EARLIER[name]
    layout = of_method(method, row)
    assert normalized(row, layout) == expected
    if isinstance(expected, dict):  # rows of the same source without any are conversations as well
        first = normalized({**row, "history": None}, layout)
        assert isinstance(first, dict)
        assert isinstance(first["prompt"], list)


def test_a_history_without_rounds_leaves_texts_as_they_are() -> None:
    row = {"instruction": "1+1?", "input": "", "output": "2", "history": []}
    assert isinstance(normalized(row, of_method("sft", row))["prompt"], str)


def of_method(method: str, row: dict[str, Any]) -> ColumnMapping:
    """Returns how a method reads such rows."""
    own = {"grpo": {"rewards": ["length"]}} if method == "grpo" else {}
    document = {"name": "x", "model": {"base": "org/m"}, "data": {"source": "x"}, "training": {"method": method, **own}}
    recipe = load.validate(document, origin="x")
    return schema.infer_mapping(DataSource(uri="x"), recipe, list(dict.fromkeys(schema.column_paths(row))))
