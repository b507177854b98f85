"""Shapes of rows: found from method and columns, brought to one of a few, refused with a reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data_split import formats
from components.shared import recipe_file
from components.shared.errors import UserError
from components.shared.recipe import Data, Recipe

GSM8K = {"prompt": "question", "completion": "answer"}


def data(**settings: Any) -> Data:
    """The data section of a recipe."""
    return Data(source=["rows.jsonl"], **settings)


def recipe(method: str, **settings: Any) -> Recipe:
    """A recipe of a method."""
    own = {method: {"rewards": ["exact"]}} if method in ("grpo", "rloo") else {}
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl", **settings},
        "training": {"method": method, **own},
    }
    return recipe_file.validate(document, origin="r.yaml")


DETECTED = {
    "text": ("sft", ["text", "id"], {}, "text"),
    "prompt-completion": ("sft", ["prompt", "completion"], {}, "prompt-completion"),
    "instruction": ("sft", ["instruction", "output", "input"], {}, "instruction"),
    "messages": ("sft", ["messages", "prompt", "completion"], {}, "messages"),
    "mapped": ("sft", ["question", "answer"], GSM8K, "prompt-completion"),
    "mapped text": ("sft", ["body"], {"text": "body"}, "text"),
    "more beats less": ("sft", ["text", "prompt", "completion"], {}, "prompt-completion"),
    "pretraining takes text alone": ("pretrain", ["text", "prompt", "completion"], {}, "text"),
    "pairs": ("dpo", ["prompt", "chosen", "rejected"], {}, "preference"),
    "pairs without a prompt": ("reward", ["chosen", "rejected", "score"], {}, "preference"),
    "pairs beside messages": ("orpo", ["messages", "chosen", "rejected"], {}, "preference"),
    "pairs by other names": ("cpo", ["good", "bad"], {"chosen": "good", "rejected": "bad"}, "preference"),
    "ratings": ("kto", ["prompt", "completion", "label"], {}, "rated"),
    "pairs to be rated": ("kto", ["prompt", "chosen", "rejected"], {}, "preference"),
    "ratings beat pairs": ("kto", ["prompt", "completion", "label", "chosen", "rejected"], {}, "rated"),
    "prompts": ("grpo", ["prompt", "completion", "text"], {}, "prompt"),
    "mapped prompts": ("rloo", ["question", "answer"], {"prompt": "question"}, "prompt"),
}


@pytest.mark.parametrize(("method", "columns", "mapping", "expected"), DETECTED.values(), ids=DETECTED)
def test_detect(method: str, columns: list[str], mapping: dict[str, str], expected: str):
    assert formats.detect(recipe(method, columns=mapping), columns) == expected


def test_a_format_that_is_named_is_taken():
    assert formats.detect(recipe("sft", format="text"), ["messages"]) == "text"


UNFIT = {
    "unmapped": ("pretrain", ["question", "answer"], {}, "(text: text)"),
    "half": ("dpo", ["prompt", "chosen"], {}, "(preference: chosen, rejected)"),
    "half mapped": (
        "kto",
        ["question", "label"],
        {"prompt": "question"},
        "(rated: prompt, completion, label; preference: chosen, rejected)",
    ),
    "of another method": ("grpo", ["text", "messages"], {}, "(prompt: prompt)"),
    "supervised": (
        "sft",
        ["prompt", "chosen", "rejected"],
        {},
        "(text: text; prompt-completion: prompt, completion; instruction: instruction, output; messages: messages)",
    ),
}


@pytest.mark.parametrize(("method", "columns", "mapping", "shapes"), UNFIT.values(), ids=UNFIT)
def test_columns_that_fit_nothing(method: str, columns: list[str], mapping: dict[str, str], shapes: str):
    with pytest.raises(UserError) as caught:
        formats.detect(recipe(method, columns=mapping), columns)

    assert caught.value.message == (
        f"data.source has columns {', '.join(sorted(columns))}, which fit no format that {method} learns from {shapes}."
    )
    assert caught.value.remedy == "Map them with data.columns, for example {prompt: question, completion: answer}."


def test_gsm8k_columns():
    row = {"question": "1+1?", "answer": "1+1=2\n#### 2", "id": 7}

    found = formats.normalise(row, data(columns=GSM8K), "prompt-completion")

    assert found == {"prompt": "1+1?", "completion": "1+1=2\n#### 2"}


INSTRUCTION = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:"
)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:"
)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({}, INSTRUCTION),
        ({"input": ""}, INSTRUCTION),
        ({"input": None}, INSTRUCTION),
        ({"input": "1 and 2"}, WITH_INPUT),
    ],
    ids=["no input", "empty input", "null input", "input"],
)
def test_the_prompt_of_an_instruction(given: dict[str, Any], prompt: str):
    found = formats.normalise({"instruction": "Add.", "output": "3", **given}, data(), "instruction")

    assert found == {"prompt": prompt, "completion": "3"}


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def test_messages_keep_role_and_content():
    found = formats.normalise({"messages": [{**USER, "name": "x"}, ANSWER], "id": 1}, data(), "messages")

    assert found == {"messages": [USER, ANSWER]}


REFUSED = {
    "missing": ("prompt-completion", {"prompt": "x"}, "column 'completion' is missing"),
    "null": ("text", {"text": None}, "column 'text' is missing"),
    "number": ("text", {"text": 3}, "column 'text' is a int, expected text"),
    "list": ("prompt-completion", {"prompt": ["x"], "completion": "y"}, "column 'prompt' is a list, expected text"),
    "surrogate": ("text", {"text": "a\ud800"}, "column 'text' holds a lone surrogate"),
    "blank text": ("text", {"text": " \n\t"}, "text is empty"),
    "blank completion": ("prompt-completion", {"prompt": "x", "completion": " "}, "completion is empty"),
    "blank output": ("instruction", {"instruction": "x", "output": ""}, "completion is empty"),
    "input of a wrong type": (
        "instruction",
        {"instruction": "x", "input": 3, "output": "y"},
        "column 'input' is a int, expected text",
    ),
    "no messages": ("messages", {"messages": []}, "messages is a list, expected a non-empty list"),
    "messages in words": ("messages", {"messages": "Hi"}, "messages is a str, expected a non-empty list"),
    "message in words": ("messages", {"messages": ["Hi"]}, "message 1 has no role"),
    "no role": ("messages", {"messages": [USER, {"content": "x"}]}, "message 2 has no role"),
    "role surrogate": ("messages", {"messages": [{**USER, "role": "\ud800"}, ANSWER]}, "message 1 has no role"),
    "no content": ("messages", {"messages": [{"role": "user"}]}, "message 1 has no text content"),
    "parts": ("messages", {"messages": [{"role": "user", "content": [{}]}]}, "message 1 has no text content"),
    "content surrogate": (
        "messages",
        {"messages": [USER, {**ANSWER, "content": "\udfff"}]},
        "message 2 has no text content",
    ),
    "nobody answers": ("messages", {"messages": [USER]}, "messages has no assistant turn"),
}


PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
RATED = {"prompt": "1+1?", "completion": "2", "label": True}
REFUSED |= {
    "pair without prompt": (
        "preference",
        {"chosen": "2", "rejected": "3"},
        "chosen and rejected are texts, but there is no prompt",
    ),
    "null prompt": ("preference", {**PAIR, "prompt": None}, "chosen and rejected are texts, but there is no prompt"),
    "blank prompt": ("preference", {**PAIR, "prompt": " "}, "prompt is empty"),
    "no chosen": ("preference", {"prompt": "x", "rejected": "3"}, "column 'chosen' is missing"),
    "blank chosen": ("preference", {**PAIR, "chosen": ""}, "chosen is empty"),
    "blank rejected": ("preference", {**PAIR, "rejected": "\n"}, "rejected is empty"),
    "nothing preferred": ("preference", {**PAIR, "rejected": "2"}, "chosen and rejected are the same"),
    "number preferred": ("preference", {**PAIR, "chosen": 2}, "column 'chosen' is a int, expected text"),
    "conversation to a text": (
        "preference",
        {**PAIR, "prompt": [USER]},
        "column 'prompt' is a list, expected text",
    ),
    "rejected surrogate": ("preference", {**PAIR, "rejected": "\ud800"}, "column 'rejected' holds a lone surrogate"),
    "unrated": ("rated", {"prompt": "x", "completion": "y"}, "column 'label' is missing"),
    "rated blank": ("rated", {**RATED, "completion": " "}, "completion is empty"),
    "rated list": ("rated", {**RATED, "completion": [ANSWER]}, "column 'completion' is a list, expected text"),
    "rated conversation": (
        "rated",
        {**RATED, "prompt": [USER]},
        "a rated row's prompt is a conversation, expected text",
    ),
    "no prompt": ("prompt", {"answer": "2"}, "column 'prompt' is missing"),
    "prompt of nothing": ("prompt", {"prompt": "\t", "answer": "2"}, "prompt is empty"),
    "prompt that is a number": ("prompt", {"prompt": 5}, "column 'prompt' is a int, expected text"),
    "answer surrogate": ("prompt", {"prompt": "x", "answer": "\ud800"}, "column 'answer' holds a lone surrogate"),
}


@pytest.mark.parametrize(("row_format", "row", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_cannot_be_used(row_format: str, row: dict[str, Any], reason: str):
    assert formats.normalise(row, data(), row_format) == reason


def test_a_reason_names_the_sources_own_column():
    found = formats.normalise({"question": "x"}, data(columns=GSM8K), "prompt-completion")

    assert found == "column 'answer' is missing"


def test_a_pair_of_texts():
    assert formats.normalise({**PAIR, "id": 3}, data(), "preference") == PAIR


LABELS = {
    **dict.fromkeys([True, 1, "true", "True", "1", " yes ", "GOOD"], True),
    **dict.fromkeys([False, 0, "false", "FALSE", "0", "no", "bad\n"], False),
}


@pytest.mark.parametrize(("label", "expected"), [*LABELS.items(), (1, True), (0, False)], ids=repr)
def test_a_label_is_true_or_false(label: Any, expected: bool):
    found = formats.normalise({**RATED, "label": label}, data(), "rated")

    assert isinstance(found, dict)
    assert found == {**RATED, "label": expected}
    assert found["label"] is expected


@pytest.mark.parametrize("label", ["maybe", 2, -1, "", 0.5, "tru", ["true"]], ids=repr)
def test_a_label_that_says_nothing(label: Any):
    found = formats.normalise({**RATED, "label": label}, data(), "rated")

    assert found == f"label is {label!r}, expected true or false"


ANSWERS = {
    "text": ("2", "2"),
    "number": (2, "2"),
    "fraction": (0.5, "0.5"),
    "truth": (True, "true"),
    "list": (["a", "é"], '["a", "é"]'),
    "mapping": ({"unit": "€"}, '{"unit": "€"}'),
}


@pytest.mark.parametrize("prompt", ["1+1?", [USER]], ids=["text", "conversation"])
@pytest.mark.parametrize(("answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_becomes_text(answer: Any, expected: str, prompt: Any):
    found = formats.normalise({"prompt": prompt, "answer": answer}, data(), "prompt")

    assert found == {"prompt": prompt, "answer": expected}


def test_a_prompt_needs_no_answer():
    for row in ({"prompt": "1+1?"}, {"prompt": "1+1?", "answer": None}):
        assert formats.normalise(row, data(), "prompt") == {"prompt": "1+1?"}


def test_further_columns_are_kept_as_text():
    kept = data(columns={"prompt": "question"}, extra_columns=["level", "tests", "tag"])
    row = {"question": "1+1?", "answer": "2", "level": 3, "tests": ["a == 1", "é"], "tag": "sums", "other": "x"}

    found = formats.normalise(row, kept, "prompt")

    assert found == {"prompt": "1+1?", "answer": "2", "level": "3", "tests": '["a == 1", "é"]', "tag": "sums"}


EXTRA = {
    "absent": ({}, "column 'level' is missing"),
    "null": ({"level": None}, "column 'level' is missing"),
    "surrogate": ({"level": "\ud800"}, "column 'level' holds a lone surrogate"),
    "surrogate inside": ({"level": ["\ud800"]}, "column 'level' holds a lone surrogate"),
}


@pytest.mark.parametrize(("row", "reason"), EXTRA.values(), ids=EXTRA)
def test_a_further_column_that_cannot_be_kept(row: dict[str, Any], reason: str):
    assert formats.normalise({"text": "x", **row}, data(extra_columns=["level"]), "text") == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab \ud800é", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(
    row=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("prompt", "chosen", "rejected", "completion", "label"), JSON)
    ),
    more=st.fixed_dictionaries({}, optional=dict.fromkeys(("messages", "text", "answer", "level"), JSON)),
    row_format=st.sampled_from(sorted(formats.NEEDED)),
)
def test_whatever_a_row_holds_it_is_refused_or_can_be_written(row: Any, more: Any, row_format: str):
    found = formats.normalise({**row, **more}, data(extra_columns=["level"]), row_format)

    assert found
    if not isinstance(found, str):
        written = json.loads(json.dumps(found, ensure_ascii=False).encode())
        assert written == found
        assert {type(value) for value in found.values()} <= {str, bool, list}
