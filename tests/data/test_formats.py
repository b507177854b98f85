"""Shapes of rows: found from method and columns, brought to one of a few, refused with a reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.data.schema import NEEDED, ColumnMapping
from tests.data.splitting import normalized

GSM8K = {"prompt": "question", "completion": "answer"}


def layout(
    row_format: str, columns: dict[str, Any] | None = None, extra_columns: list[str] | None = None
) -> ColumnMapping:
    """The layout of rows."""
    return ColumnMapping(format=row_format, columns=columns or {}, extra_columns=tuple(extra_columns or ()))


JOINED = {"prompt": ["title", "body"], "completion": "reply"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"title": "Sum", "body": "1+1?"}, "Sum\n\n1+1?"),
        ({"title": "Sum", "body": " "}, "Sum"),
        ({"title": None, "body": "1+1?"}, "1+1?"),
        ({"body": "1+1?"}, "1+1?"),
        ({"title": 7, "body": "1+1?"}, "7\n\n1+1?"),
        ({"title": "", "body": None}, None),
    ],
    ids=["both", "one blank", "one null", "one absent", "a number", "none"],
)
def test_columns_that_are_joined(row: dict[str, Any], expected: str | None):
    found = normalized({**row, "reply": "2"}, layout("prompt-completion", JOINED))

    assert found == ({"prompt": expected, "completion": "2"} if expected else "column 'title' + 'body' is missing")


def test_columns_joined_by_something_else():
    by = ColumnMapping(format="text", columns={"text": ["a", "b", "c"]}, join=" | ")

    assert normalized({"a": "x", "b": "", "c": "y"}, by) == {"text": "x | y"}


def test_gsm8k_columns():
    row = {"question": "1+1?", "answer": "1+1=2\n#### 2", "id": 7}

    found = normalized(row, layout("prompt-completion", GSM8K))

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
    found = normalized({"instruction": "Add.", "output": "3", **given}, layout("instruction"))

    assert found == {"prompt": prompt, "completion": "3"}


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def test_messages_keep_role_and_content():
    found = normalized({"messages": [{**USER, "mood": "x"}, ANSWER], "id": 1}, layout("messages"))

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
        "chosen and rejected are texts that share no first words, but there is no prompt",
    ),
    "null prompt": (
        "preference",
        {**PAIR, "prompt": None},
        "chosen and rejected are texts that share no first words, but there is no prompt",
    ),
    "pair without prompt, one a list": (
        "preference",
        {"chosen": "2", "rejected": [3]},
        "chosen is a str, expected a non-empty list",
    ),
    "pair without prompt, one a number": (
        "preference",
        {"chosen": "2", "rejected": True},
        "column 'rejected' is a bool, expected text",
    ),
    "blank prompt": ("preference", {**PAIR, "prompt": " "}, "prompt is empty"),
    "no chosen": ("preference", {"prompt": "x", "rejected": "3"}, "column 'chosen' is missing"),
    "blank chosen": ("preference", {**PAIR, "chosen": ""}, "chosen is empty"),
    "blank rejected": ("preference", {**PAIR, "rejected": "\n"}, "rejected is empty"),
    "number preferred": ("preference", {**PAIR, "chosen": 2}, "column 'chosen' is a int, expected text"),
    "rejected surrogate": ("preference", {**PAIR, "rejected": "\ud800"}, "column 'rejected' holds a lone surrogate"),
    "unrated": ("rated", {"prompt": "x", "completion": "y"}, "column 'label' is missing"),
    "rated blank": ("rated", {**RATED, "completion": " "}, "completion is empty"),
    "rated question": (
        "rated",
        {**RATED, "prompt": [USER], "completion": [USER]},
        "completion does not end on an assistant turn",
    ),
    "rated prompt of nothing": (
        "rated",
        {**RATED, "prompt": []},
        "prompt is a list, expected a non-empty list",
    ),
    "rated number": (
        "rated",
        {**RATED, "prompt": [USER], "completion": 2},
        "completion is a int, expected a non-empty list",
    ),
    "no prompt": ("prompt", {"answer": "2"}, "column 'prompt' is missing"),
    "prompt of nothing": ("prompt", {"prompt": "\t", "answer": "2"}, "prompt is empty"),
    "prompt that is a number": ("prompt", {"prompt": 5}, "column 'prompt' is a int, expected text"),
    "answer surrogate": ("prompt", {"prompt": "x", "answer": "\ud800"}, "column 'answer' holds a lone surrogate"),
}


@pytest.mark.parametrize(("row_format", "row", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_cannot_be_used(row_format: str, row: dict[str, Any], reason: str):
    assert normalized(row, layout(row_format)) == reason


def test_a_reason_names_the_sources_own_column():
    found = normalized({"question": "x"}, layout("prompt-completion", GSM8K))

    assert found == "column 'answer' is missing"


def test_a_pair_of_texts():
    assert normalized({**PAIR, "id": 3}, layout("preference")) == PAIR


RANKED = {
    "best and one other": ({"responses": ["3", "2"], "scores": [0.1, 0.9]}, ("2", {"3"})),
    "the best first": ({"responses": ["2", "3", "4"]}, ("2", {"3", "4"})),
    "null scores": ({"responses": ["2", "3"], "scores": None}, ("2", {"3"})),
    "one of those below": ({"responses": ["3", "2", "4"], "scores": ["1", "5", "2"]}, ("2", {"3", "4"})),
    "level with the best": ({"responses": ["2", "two", "3"], "scores": [5, 5, 1]}, ("2", {"3"})),
}


@pytest.mark.parametrize(("row", "expected"), RANKED.values(), ids=RANKED)
def test_a_ranked_row_becomes_a_pair(row: dict[str, Any], expected: tuple[str, set[str]]):
    drawn = set()
    for number in range(20):
        found = normalized({"prompt": f"{number}", **row}, layout("ranked"))
        assert isinstance(found, dict)
        assert (found["prompt"], found["chosen"]) == (f"{number}", expected[0])
        assert found == normalized({"prompt": f"{number}", **row}, layout("ranked"))
        drawn.add(found["rejected"])

    assert drawn == expected[1]


def test_ranked_conversations():
    row = {"prompt": [USER], "responses": [[USER, ANSWER], [USER, {**ANSWER, "content": "Go"}]], "scores": [0, 1]}

    found = normalized(row, layout("ranked"))

    assert found == {"prompt": [USER], "chosen": [{"role": "assistant", "content": "Go"}], "rejected": [ANSWER]}


SIDE_BY_SIDE = {
    "scores": ({"scores": ["s_a", "s_b"]}, {"s_a": 1, "s_b": 2}),
    "ranks": ({"ranks": ["s_a", "s_b"]}, {"s_a": 2, "s_b": 1}),
    "by its column": ({"preferred": "best"}, {"best": "Answer_B"}),
    "by its ending": ({"preferred": "best"}, {"best": " b\n"}),
    "by another name with its ending": ({"preferred": "best"}, {"best": "model_b"}),
    "two words": ({"preferred": "best"}, {"best": "Assistant B"}),
    "margin": ({"margin": "by"}, {"by": 0.5}),
    "path": ({"margin": "votes.1.by"}, {"votes": [{}, {"by": "3"}]}),
}


@pytest.mark.parametrize(("columns", "row"), SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_answers_side_by_side(columns: dict[str, Any], row: dict[str, Any]):
    by = layout("ranked", {"responses": ["answer_a", "answer_b"], **columns})

    assert normalized({"prompt": "1+1?", "answer_a": "3", "answer_b": "2", **row}, by) == PAIR


LEVEL = "no response is better than another"
NO_WORD = "no column ranks the responses (scores, ranks, preferred or margin)"
NOT_SAID = {
    "a tie": ({"best": "tie (bothbad)"}, LEVEL),
    "none of them": ({"best": "neither"}, LEVEL),
    "no word": ({"best": " "}, LEVEL),
    "no margin": ({"by": 0.0}, LEVEL),
    "another name": ({"best": "c"}, "preferred is 'c', expected one of answer_a, answer_b"),
    "a word that ends so": ({"best": "club"}, "preferred is 'club', expected one of answer_a, answer_b"),
    "a number for letters": ({"best": 1}, "preferred is 1, expected one of answer_a, answer_b"),
    "a margin in words": ({"by": "much"}, "margin are not numbers"),
    "nothing": ({}, NO_WORD),
    "one answer": ({"best": "a", "answer_b": None}, "column 'answer_a' + 'answer_b' is missing"),
}


@pytest.mark.parametrize(("row", "reason"), NOT_SAID.values(), ids=NOT_SAID)
def test_answers_side_by_side_that_cannot_be_used(row: dict[str, Any], reason: str):
    by = layout("ranked", {"responses": ["answer_a", "answer_b"], "preferred": "best", "margin": "by"})

    assert normalized({"prompt": "1+1?", "answer_a": "3", "answer_b": "2", **row}, by) == reason


MAPPINGS = {
    "scores": ([{"text": "3", "score": 1}, {"text": "2", "score": 2}], PAIR),
    "ranks": ([{"answer": "3", "rank": 2.0}, {"answer": "2", "rank": 1.0}], PAIR),
    "one without a score": ([{"text": "3", "score": 1}, {"text": "2"}], "scores are not numbers"),
    "other keys": (
        [{"a": "3"}, {"a": "2"}],
        "responses are mappings without text or response or answer or completion or output or content or summary",
    ),
}


@pytest.mark.parametrize(("responses", "expected"), MAPPINGS.values(), ids=MAPPINGS)
def test_responses_that_are_mappings(responses: list[Any], expected: Any):
    assert normalized({"prompt": "1+1?", "responses": responses}, layout("ranked")) == expected


@pytest.mark.parametrize("best", [1, 1.0, "1"], ids=repr)
def test_an_answer_of_a_list_is_preferred_by_its_place(best: Any):
    row = {"prompt": "1+1?", "responses": ["3", "2"], "preferred": best}

    assert normalized(row, layout("ranked")) == PAIR


def test_texts_that_are_json_of_other_things_stay_texts():
    by = layout("ranked", {"responses": ["answer_a", "answer_b"], "preferred": "best"})
    row = {"prompt": "[1, 2", "answer_a": "[3]", "answer_b": "[2]", "best": "b"}

    assert normalized(row, by) == {"prompt": "[1, 2", "chosen": "[2]", "rejected": "[3]"}


RATINGS = {
    "conversations": ([USER], [ANSWER]),
    "a text after a conversation": ([USER], "Hello"),
    "one message": ([USER], ANSWER),
    "messages after a text": ("Hi", [ANSWER]),
    "a prompt that the answer repeats": ([USER], [USER, ANSWER]),
}


@pytest.mark.parametrize(("prompt", "completion"), RATINGS.values(), ids=RATINGS)
def test_rated_conversations(prompt: Any, completion: Any):
    found = normalized({"prompt": prompt, "completion": completion, "label": "no"}, layout("rated"))

    assert found == {"prompt": [USER], "completion": [ANSWER], "label": False}


UNRANKED = {
    "words": ({"responses": "2"}, "responses is not a list of at least two"),
    "one": ({"responses": ["2"]}, "responses is not a list of at least two"),
    "scores of others": ({"responses": ["2", "3"], "scores": [1]}, "scores is not a list of 2, one for each response"),
    "scores in words": ({"responses": ["2", "3"], "scores": ["good", "bad"]}, "scores are not numbers"),
    "scores that are none": ({"responses": ["2", "3"], "scores": [1, None]}, "scores are not numbers"),
    "not a number": ({"responses": ["2", "3"], "scores": [1, float("nan")]}, "scores are not numbers"),
    "all level": ({"responses": ["2", "3"], "scores": [1, 1]}, "no response is better than another"),
    "all the same": ({"responses": ["2", "2"]}, "no response is better than another"),
    "a blank response": ({"responses": ["2", " "]}, "rejected is empty"),
    "a number": ({"responses": ["2", 3]}, "column 'rejected' is a int, expected text"),
}


@pytest.mark.parametrize(("row", "reason"), UNRANKED.values(), ids=UNRANKED)
def test_a_ranked_row_that_cannot_be_used(row: dict[str, Any], reason: str):
    assert normalized({"prompt": "1+1?", **row}, layout("ranked")) == reason


LABELS = {
    **dict.fromkeys([True, 1, "true", "True", "1", " yes ", "GOOD"], True),
    **dict.fromkeys([False, 0, "false", "FALSE", "0", "no", "bad\n"], False),
}


@pytest.mark.parametrize(("label", "expected"), [*LABELS.items(), (1, True), (0, False)], ids=repr)
def test_a_label_is_true_or_false(label: Any, expected: bool):
    found = normalized({**RATED, "label": label}, layout("rated"))

    assert isinstance(found, dict)
    assert found == {**RATED, "label": expected}
    assert found["label"] is expected


@pytest.mark.parametrize("label", ["maybe", 2, -1, "", 0.5, "tru", ["true"]], ids=repr)
def test_a_label_that_says_nothing(label: Any):
    found = normalized({**RATED, "label": label}, layout("rated"))

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
    found = normalized({"prompt": prompt, "answer": answer}, layout("prompt"))

    assert found == {"prompt": prompt, "answer": expected}


def test_a_prompt_needs_no_answer():
    for row in ({"prompt": "1+1?"}, {"prompt": "1+1?", "answer": None}):
        assert normalized(row, layout("prompt")) == {"prompt": "1+1?"}


def test_further_columns_are_kept_as_text():
    kept = layout("prompt", {"prompt": "question"}, ["level", "tests", "tag"])
    row = {"question": "1+1?", "answer": "2", "level": 3, "tests": ["a == 1", "é"], "tag": "sums", "other": "x"}

    found = normalized(row, kept)

    assert found == {"prompt": "1+1?", "answer": "2", "level": "3", "tests": '["a == 1", "é"]', "tag": "sums"}


EXTRA = {
    "absent": ({}, "column 'level' is missing"),
    "null": ({"level": None}, "column 'level' is missing"),
    "surrogate": ({"level": "\ud800"}, "column 'level' holds a lone surrogate"),
    "surrogate inside": ({"level": ["\ud800"]}, "column 'level' holds a lone surrogate"),
}


@pytest.mark.parametrize(("row", "reason"), EXTRA.values(), ids=EXTRA)
def test_a_further_column_that_cannot_be_kept(row: dict[str, Any], reason: str):
    assert normalized({"text": "x", **row}, layout("text", extra_columns=["level"])) == reason


KEYS = ["role", "content", "from", "value"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab \ud800é", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=2),
    max_leaves=8,
)


MORE = ("messages", "conversations", "text", "answer", "level", "responses", "scores", "ranks", "preferred", "margin")


@given(
    row=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("prompt", "chosen", "rejected", "completion", "label"), JSON)
    ),
    more=st.fixed_dictionaries({}, optional=dict.fromkeys(MORE, JSON)),
    row_format=st.sampled_from(sorted(NEEDED)),
)
def test_whatever_a_row_holds_it_is_refused_or_can_be_written(row: Any, more: Any, row_format: str):
    found = normalized({**row, **more}, layout(row_format, extra_columns=["level"]))

    assert found
    if not isinstance(found, str):
        written = json.loads(json.dumps(found, ensure_ascii=False).encode())
        assert written == found
        assert {type(value) for value in found.values()} <= {str, bool, list}
