"""What of a row counts: by `data.train_on`, by a message's own flag, and where an answer to a prompt begins."""

from __future__ import annotations

from typing import Any

import pytest

from baton.data.encoding import ChatEncoder
from baton.errors import RowError
from baton.models.train_rows import IGNORED
from baton.recipe.data import Data
from tests.data.masks.shapes import AWKWARD, CONVERSATIONS, call, said, system, templates, tokenizer_of, user

Row = dict[str, Any]

TURNS: list[Row] = [system("Be."), user("one"), said("First."), user("two"), said("Second.")]
SPLIT: Row = {"prompt": TURNS[:4], "completion": TURNS[4:]}
FIRST, SECOND = "First.</s>", "Second.</s>"
WHOLE = "<|system|>Be.</s><|user|>one</s><|assistant|>First.</s><|user|>two</s><|assistant|>Second.</s>"
COUNTED = {
    ("all", "messages"): WHOLE,
    ("completions", "messages"): WHOLE,
    (None, "messages"): WHOLE,
    ("assistant", "messages"): FIRST + SECOND,
    ("last", "messages"): SECOND,
    ("all", "split"): WHOLE,
    ("completions", "split"): SECOND,
    (None, "split"): SECOND,
    ("assistant", "split"): FIRST + SECOND,
    ("last", "split"): SECOND,
}


def counted(row: Row, train_on: str | None, template: str = "tools in the system turn") -> str:
    """What of a row counts, in words."""
    tokenizer = tokenizer_of(templates()[template])
    (made,) = ChatEncoder(tokenizer, train_on).sequences([row])
    if isinstance(made, RowError):
        return str(made)
    text = tokenizer.decode([token for token in made["labels"] if token != IGNORED])
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(("case", "expected"), COUNTED.items(), ids=lambda value: str(value)[:30])
def test_what_counts(case: tuple[str | None, str], expected: str) -> None:
    train_on, shape = case
    assert counted({"messages": TURNS} if shape == "messages" else SPLIT, train_on) == expected


def flagged(**flags: bool) -> Row:
    """The conversation, with flags at some of its messages by number."""
    return {"messages": [{**m, **({"train": flags[f"m{n}"]} if f"m{n}" in flags else {})} for n, m in enumerate(TURNS)]}


FLAGS = {
    "one turn left out": (flagged(m2=False), "assistant", SECOND),
    "one more than the last": (flagged(m2=True), "last", FIRST + SECOND),
    "a question that counts": (flagged(m3=True), "last", "two</s>" + SECOND),
    "all but a turn": (flagged(m2=False), None, WHOLE.replace(FIRST, "")),
    "none": (flagged(m2=False, m4=False), "assistant", "none of its messages counts in the loss"),
}


@pytest.mark.parametrize(("row", "train_on", "expected"), FLAGS.values(), ids=FLAGS)
def test_a_flag_overrules(row: Row, train_on: str | None, expected: str) -> None:
    assert counted(row, train_on) == expected


OLDER: dict[str, tuple[Row, str | None]] = {
    "neither": ({}, None),
    "completions": ({"completion_only_loss": True}, None),
    "all": ({"completion_only_loss": False}, "all"),
    "assistant": ({"assistant_only_loss": True, "completion_only_loss": True}, "assistant"),
    "as it was written in full": ({"completion_only_loss": True, "assistant_only_loss": False}, None),
}


@pytest.mark.parametrize(("given", "expected"), OLDER.values(), ids=OLDER)
def test_the_older_keys_are_understood(given: Row, expected: str | None) -> None:
    assert Data.model_validate({"source": "r.jsonl", **given}).train_on == expected


def test_the_older_keys_do_not_go_with_the_new_one() -> None:
    with pytest.raises(ValueError, match="assistant_only_loss and train_on set the same; remove assistant_only_loss"):
        Data.model_validate({"source": "r.jsonl", "train_on": "all", "assistant_only_loss": True})


@pytest.mark.parametrize("name", ["qwen3_5_think", "nemotron_3_nano", "a prompt with text", "gptoss", "deepseekv3"])
def test_an_answer_holds_nothing_of_its_prompt(name: str) -> None:
    """Also where the prompt, as the model would continue it, is no beginning of the whole."""
    tokenizer = tokenizer_of(templates()[name])
    row = {"prompt": [user("<b>one</b>")], "chosen": [said("<thing> two")], "rejected": [said("three")]}
    for side, text in (("chosen", "<thing> two"), ("rejected", "three")):
        (answer,) = ChatEncoder(tokenizer, None).answers([row], side, with_prompt_length=True)
        assert not isinstance(answer, RowError)
        asked, answered = (tokenizer.decode(ids) for ids in (answer.ids[: answer.length], answer.ids[answer.length :]))
        assert text in answered
        assert "one" not in answered
        assert asked.startswith(str(tokenizer.apply_chat_template(row["prompt"], tokenize=False)).removesuffix("</s>"))
        assert "assistant" not in answered
        assert "Assistant" not in answered


def test_what_the_template_leaves_out_is_counted() -> None:
    talk = ChatEncoder(tokenizer_of(templates()["llama3"]), "assistant")
    talk.sequences([CONVERSATIONS["reasoning and calls"], CONVERSATIONS["several turns"]])
    assert talk.told == {"tool calls": 1, "texts of reasoning": 3, "tools": 2}


def test_a_call_is_not_found_in_the_list_of_tools() -> None:
    template = "{{ tools | tojson }}" + AWKWARD["trailing white space"]
    asked = said("Well.", tool_calls=[call("weather", place="Oslo")])
    talk = ChatEncoder(tokenizer_of(template), "assistant")
    talk.sequences([{"messages": [user("How is it there?"), asked], "tools": CONVERSATIONS["tool call"]["tools"]}])
    assert talk.told == {"tool calls": 1}
