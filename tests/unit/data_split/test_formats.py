"""Shapes of rows: found from the columns, brought to one of three, refused with a reason."""

from typing import Any

import pytest

from components.data_split import formats
from components.shared.errors import UserError
from components.shared.recipe import Data

GSM8K = {"prompt": "question", "completion": "answer"}


def data(**settings: Any) -> Data:
    """The data section of a recipe."""
    return Data(source=["rows.jsonl"], **settings)


DETECTED = {
    "text": (["text", "id"], {}, "text"),
    "prompt-completion": (["prompt", "completion"], {}, "prompt-completion"),
    "instruction": (["instruction", "output", "input"], {}, "instruction"),
    "messages": (["messages", "prompt", "completion"], {}, "messages"),
    "mapped": (["question", "answer"], GSM8K, "prompt-completion"),
    "mapped text": (["body"], {"text": "body"}, "text"),
    "more beats less": (["text", "prompt", "completion"], {}, "prompt-completion"),
}


@pytest.mark.parametrize(("columns", "mapping", "expected"), DETECTED.values(), ids=DETECTED)
def test_detect(columns: list[str], mapping: dict[str, str], expected: str):
    assert formats.detect(data(columns=mapping), columns) == expected


def test_a_format_that_is_named_is_taken():
    assert formats.detect(data(format="text"), ["messages"]) == "text"


@pytest.mark.parametrize(
    ("columns", "mapping"),
    [(["question", "answer"], {}), (["prompt"], {}), (["question"], GSM8K)],
    ids=["unmapped", "half", "half mapped"],
)
def test_columns_that_fit_nothing(columns: list[str], mapping: dict[str, str]):
    with pytest.raises(UserError) as caught:
        formats.detect(data(columns=mapping), columns)

    assert f"data.source has columns {', '.join(sorted(columns))}, which fit no format" in str(caught.value)
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


@pytest.mark.parametrize(("row_format", "row", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_cannot_be_used(row_format: str, row: dict[str, Any], reason: str):
    assert formats.normalise(row, data(), row_format) == reason


def test_a_reason_names_the_sources_own_column():
    found = formats.normalise({"question": "x"}, data(columns=GSM8K), "prompt-completion")

    assert found == "column 'answer' is missing"
