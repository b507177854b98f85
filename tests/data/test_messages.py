"""What a message holds beside its text: tool calls, reasoning, names, flags; and what a row's tools become."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.data import normalize
from baton.data.schema import ColumnMapping
from baton.errors import RowError
from baton.models import chat as conversing
from baton.recipe import load
from tests.data.splitting import normalized, rejected, sides, split, write

Row = dict[str, Any]

ASK: Row = {"role": "user", "content": "1+1?"}
RIGHT: Row = {"role": "assistant", "content": "2"}
WRONG: Row = {"role": "assistant", "content": "3"}
ADD: Row = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
BARE: Row = ADD["function"]
ARGUMENTS = {"a": 1, "b": {"c": [None, "é"]}}


def called(*calls: Row, content: str = "", **more: Any) -> Row:
    """An assistant's turn that calls tools, as it is written."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def call(arguments: Row = ARGUMENTS, **more: Any) -> Row:
    """A call as it is written."""
    return {"type": "function", "function": {"name": "add", "arguments": arguments}, **more}


def normalised(row: Row, row_format: str = "messages", *, reasoning: bool = True, **columns: str) -> Any:
    """What becomes of a row whose columns are called as ours."""
    layout = ColumnMapping(format=row_format, columns={}, beside={"tools": "tools", "system": "system", **columns})
    return normalized(row, layout, reasoning=reasoning)


CALLS: dict[str, tuple[Row, Row]] = {
    "OpenAI's": (
        {
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
            ],
        },
        called(call(id="c1")),
    ),
    "an object": ({"tool_calls": [{"function": {"name": "add", "arguments": ARGUMENTS}}]}, called(call())),
    "flat": ({"content": "", "tool_calls": [{"name": "add", "arguments": ARGUMENTS}]}, called(call())),
    "flat, arguments as text": (
        {"content": "", "tool_calls": [{"name": "add", "arguments": json.dumps(ARGUMENTS)}]},
        called(call()),
    ),
    "flat, Llama's word": ({"content": "", "tool_calls": [{"name": "add", "parameters": ARGUMENTS}]}, called(call())),
    "all as text": (
        {"content": "", "tool_calls": json.dumps([{"name": "add", "arguments": ARGUMENTS}])},
        called(call()),
    ),
    "one, not in a list": ({"content": "", "tool_calls": {"name": "add", "arguments": ARGUMENTS}}, called(call())),
    "no arguments": ({"content": "", "tool_calls": [{"name": "add"}]}, called(call({}))),
    "empty arguments": ({"content": "", "tool_calls": [{"name": "add", "arguments": ""}]}, called(call({}))),
    "with words": (
        {"content": "Let me see.", "tool_calls": [{"name": "add", "arguments": {}}]},
        called(call({}), content="Let me see."),
    ),
    "in parallel": (
        {"content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]},
        called(call({"a": 1}), call({"a": 2})),
    ),
    "legacy": ({"content": None, "function_call": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}, called(call())),
    "keys that Parquet adds": (
        {
            "content": None,
            "tool_calls": [
                {"id": None, "type": "function", "function": {"name": "add", "arguments": {"a": 1, "x": None}}}
            ],
        },
        called(call({"a": 1})),
    ),
    "none": ({"content": "2", "tool_calls": None, "function_call": None}, RIGHT),
    "none as text": ({"content": "2", "tool_calls": "[]"}, RIGHT),
}


@pytest.mark.parametrize(("message", "expected"), CALLS.values(), ids=CALLS)
def test_tool_calls(message: Row, expected: Row) -> None:
    assert normalised({"messages": [ASK, {"role": "assistant", **message}]}) == {"messages": [ASK, expected]}


REFUSED: dict[str, tuple[Row, str]] = {
    "arguments that do not parse": (
        {"content": None, "tool_calls": [{"name": "add", "arguments": "{a: 1"}]},
        "has tool_calls that call add with arguments that are not a JSON object",
    ),
    "arguments that are a list": (
        {"content": None, "tool_calls": [{"name": "add", "arguments": "[1]"}]},
        "has tool_calls that call add with arguments that are not a JSON object",
    ),
    "no name": (
        {"content": None, "tool_calls": [{"arguments": {}}]},
        "has tool_calls that are not JSON of a name and arguments",
    ),
    "words": ({"content": None, "tool_calls": "add(1, 1)"}, "has tool_calls that are not JSON of a name and arguments"),
    "a call of another type": (
        {"content": None, "tool_calls": [{"type": "custom", "function": {"name": "x"}}]},
        "has tool_calls that have type 'custom', expected function",
    ),
    "nothing said and nothing called": ({"content": None, "tool_calls": []}, "has no text content"),
    "a surrogate in arguments": (
        {"content": None, "tool_calls": [{"name": "add", "arguments": {"a": "\ud800"}}]},
        "holds a lone surrogate",
    ),
    "a picture": (
        {"content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        "has a part of type 'image_url', and only text is learned",
    ),
    "sound": (
        {"content": [{"type": "input_audio", "input_audio": {}}]},
        "has a part of type 'input_audio', and only text is learned",
    ),
    "half a weight": ({"content": "2", "weight": 0.5}, "has weight 0.5, expected 0 or 1, false or true"),
    "a weight in words": ({"content": "2", "weight": "0"}, "has weight '0', expected 0 or 1, false or true"),
    "flags that contradict each other": (
        {"content": "2", "weight": 1, "train": False},
        "has train False and weight 1, which contradict each other",
    ),
}


@pytest.mark.parametrize(("message", "reason"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("row_format", ["messages", "preference", "rated", "prompt", "prompt-completion"])
def test_a_message_that_cannot_be_used(message: Row, reason: str, row_format: str) -> None:
    said = {"role": "assistant", **message}
    row, number = {
        "messages": ({"messages": [ASK, said]}, 2),
        "preference": ({"prompt": [ASK], "chosen": [said], "rejected": [WRONG]}, 1),
        "rated": ({"prompt": [ASK], "completion": [said], "label": True}, 1),
        "prompt": ({"prompt": [ASK, said, ASK]}, 2),
        "prompt-completion": ({"prompt": [ASK], "completion": [said]}, 1),
    }[row_format]
    assert normalised(row, row_format) == f"message {number} {reason}"


def test_calls_are_the_assistants() -> None:
    row = {"messages": [{**ASK, "tool_calls": [{"name": "add"}]}, RIGHT]}
    assert normalised(row) == "message 1 has tool_calls, and is not the assistant's"


BESIDE: dict[str, tuple[Row, Row]] = {
    "a tool's answer": (
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ),
    "a function's answer": (
        {"role": "function", "content": "2", "name": "add"},
        {"role": "tool", "content": "2", "name": "add"},
    ),
    "an observation": ({"from": "observation", "value": "2"}, {"role": "tool", "content": "2"}),
    "reasoning_content": ({**RIGHT, "reasoning_content": "One, two."}, {**RIGHT, "reasoning_content": "One, two."}),
    "thinking": ({**RIGHT, "thinking": "One, two."}, {**RIGHT, "reasoning_content": "One, two."}),
    "reasoning": ({**RIGHT, "reasoning": "One, two."}, {**RIGHT, "reasoning_content": "One, two."}),
    "reasoning in parts": (
        {**RIGHT, "reasoning": [{"type": "text", "text": "One, "}, {"type": "text", "text": "two."}]},
        {**RIGHT, "reasoning_content": "One, two."},
    ),
    "no thinking": ({**RIGHT, "thinking": None, "reasoning": " "}, RIGHT),
    "a user's thinking": ({**ASK, "thinking": "x"}, ASK),
    "thinking written into the text": (
        {**RIGHT, "content": "<think>a</think>2"},
        {**RIGHT, "content": "<think>a</think>2"},
    ),
    "weight 0": ({**RIGHT, "weight": 0}, {**RIGHT, "train": False}),
    "weight 1": ({**RIGHT, "weight": 1.0}, {**RIGHT, "train": True}),
    "train": ({**RIGHT, "train": False}, {**RIGHT, "train": False}),
    "training": ({**ASK, "training": True}, {**ASK, "train": True}),
    "no flag": ({**RIGHT, "weight": None, "train": None}, RIGHT),
    "parts": (
        {**RIGHT, "content": [{"type": "text", "text": "one"}, {"text": " two"}]},
        {**RIGHT, "content": "one two"},
    ),
    "parts of Arrow": ({**RIGHT, "content": [{"type": "text", "text": "2", "image": None}]}, RIGHT),
    "a name": ({**ASK, "name": "Ada"}, {**ASK, "name": "Ada"}),
    "an empty name": ({**ASK, "name": ""}, ASK),
    "what means nothing to us": ({**RIGHT, "mood": "good", "tool_call_id": "c1"}, RIGHT),
}


@pytest.mark.parametrize(("message", "expected"), BESIDE.values(), ids=BESIDE)
def test_what_a_message_holds(message: Row, expected: Row) -> None:
    assert normalised({"messages": [ASK, message, RIGHT]}) == {"messages": [ASK, expected, RIGHT]}


DECLARED: dict[str, tuple[Any, Any]] = {
    "objects": ([ADD], [ADD]),
    "bare": ([BARE], [ADD]),
    "text": (json.dumps([ADD]), [ADD]),
    "bare, as text": (json.dumps([BARE]), [ADD]),
    "texts in a list": ([json.dumps(BARE)], [ADD]),
    "one": (BARE, [ADD]),
    "flat with a type": ([{"type": "function", **BARE}], [ADD]),
    "keys that Parquet adds": (
        [
            {
                "type": "function",
                "function": {
                    **BARE,
                    "strict": None,
                    "parameters": {"properties": {"a": {"type": "integer"}, "b": None}},
                },
            }
        ],
        [ADD],
    ),
    "none": ([], None),
    "none as text": ("[]", None),
    "nothing": ("", None),
    "words": ("add and subtract", "tools are not JSON of functions"),
    "names": (["add"], "tools are not all functions with a name"),
    "another type": ([{"type": "code_interpreter"}], "tools are not all functions with a name"),
    "a surrogate": ([{"name": "add", "description": "\ud800"}], "tools or system holds a lone surrogate"),
}


@pytest.mark.parametrize(("value", "expected"), DECLARED.values(), ids=DECLARED)
def test_tools_of_a_row(value: Any, expected: Any) -> None:
    with_tools = {"tools": expected} if expected else {}
    found = normalised({"messages": [ASK, RIGHT], "tools": value})
    assert found == (expected if isinstance(expected, str) else {"messages": [ASK, RIGHT], **with_tools})


SHAPES: dict[str, tuple[str, Row]] = {
    "messages": ("messages", {"messages": [ASK, RIGHT]}),
    "preference": ("preference", {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]}),
    "rated": ("rated", {"prompt": [ASK], "completion": [RIGHT], "label": True}),
    "prompt": ("prompt", {"prompt": [ASK], "answer": "2"}),
    "prompt and completion": ("prompt-completion", {"prompt": [ASK], "completion": [RIGHT]}),
}


@pytest.mark.parametrize(("row_format", "row"), SHAPES.values(), ids=SHAPES)
def test_tools_and_system_go_with_a_conversation(row_format: str, row: Row) -> None:
    found = normalised({**row, "tools": json.dumps([BARE]), "system": "Be kind."}, row_format)
    first = "messages" if "messages" in row else "prompt"
    assert found == {**row, first: [{"role": "system", "content": "Be kind."}, *row[first]], "tools": [ADD]}


@pytest.mark.parametrize(
    ("row_format", "row"),
    [
        ("text", {"text": "x"}),
        ("prompt-completion", {"prompt": "x", "completion": "y"}),
        ("preference", {"prompt": "x", "chosen": "y", "rejected": "z"}),
        ("rated", {"prompt": "x", "completion": "y", "label": False}),
        ("prompt", {"prompt": "x", "answer": "y"}),
    ],
)
def test_rows_of_texts_have_no_place_for_them(row_format: str, row: Row) -> None:
    assert normalised({**row, "tools": "whatever", "system": "Be kind."}, row_format) == row


TO_BE: dict[str, tuple[str, Row]] = {
    "completion": ("prompt-completion", {"prompt": "x", "completion": "y"}),
    "preference": ("preference", {"prompt": "x", "chosen": "y", "rejected": "z"}),
    "rated": ("rated", {"prompt": "x", "completion": "y", "label": False}),
    "prompt": ("prompt", {"prompt": "x", "answer": "y"}),
}


@pytest.mark.parametrize(("row_format", "row"), TO_BE.values(), ids=TO_BE)
@pytest.mark.parametrize("reasoning", [True, False])
def test_rows_of_texts_that_are_to_be_turns_have_a_place_for_them(row_format: str, row: Row, reasoning: bool) -> None:
    given_row = {**row, "prompt": "<think>x</think>y", "tools": [BARE], "system": "Be kind."}
    found = normalized(
        given_row,
        ColumnMapping(format=row_format, columns={}, beside={"tools": "tools", "system": "system"}),
        reasoning=reasoning,
        chat=True,
    )
    assert found == {**given_row, "tools": [ADD]}


def test_a_system_column_becomes_the_turn_of_a_text_that_is_rendered_as_chat(tmp_path: Path) -> None:
    rows: list[Row] = [{"question": f"{n}?", "answer": "2", "system_prompt": "Be kind." * (n % 2)} for n in range(30)]
    source = write(tmp_path / "rows.jsonl", rows)

    def turned(store: str, **data: Any) -> set[str]:
        found = split(store, source, split={"eval": 0.3}, **data)
        document = {"source": source, **data}
        given_recipe = load.validate({"name": "x", "model": {"base": "org/m"}, "data": document}, origin="x")
        written = [row for side in sides(store, found).values() for row in side]
        return {json.dumps(conversing.as_turns(row, given_recipe)["prompt"][:-1]) for row in written}

    own, default = '[{"role": "system", "content": "Be kind."}]', '[{"role": "system", "content": "Be brief."}]'
    assert turned(str(tmp_path / "a"), render_as="chat", system="Be brief.") == {own, default}
    assert turned(str(tmp_path / "b"), render_as="chat") == {own, "[]"}
    assert turned(str(tmp_path / "c")) == {own, "[]"}
    assert turned(str(tmp_path / "d"), render_as="text") == {"[]"}, "texts have no place for it"


def test_a_system_turn_of_its_own_counts() -> None:
    own = [{"role": "system", "content": "Be brief."}, ASK, RIGHT]
    assert normalised({"messages": own, "system": "Be kind."}) == {"messages": own}


FUNCTION_CALLS: dict[str, tuple[str, Any, Any]] = {
    "JSON": (json.dumps({"name": "add", "arguments": {"a": 1}}), None, called(call({"a": 1}))),
    "JSON with tools": (json.dumps({"name": "add", "arguments": {"a": 1}}), [ADD], called(call({"a": 1}))),
    "arguments as text": (json.dumps({"name": "add", "arguments": '{"a": 1}'}), None, called(call({"a": 1}))),
    "in parallel": (
        json.dumps([{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]),
        None,
        called(call({"a": 1}), call({"a": 2})),
    ),
    "words": ("add(1, 1)", None, {"role": "assistant", "content": "add(1, 1)"}),
    "words with tools": (
        "add(1, 1)",
        [ADD],
        "message 2 is from 'function_call', and its calls are not JSON of a name and arguments",
    ),
    "other JSON": ('{"a": 1}', None, {"role": "assistant", "content": '{"a": 1}'}),
}


@pytest.mark.parametrize(("value", "declared", "expected"), FUNCTION_CALLS.values(), ids=FUNCTION_CALLS)
def test_a_function_call_turn_of_sharegpt(value: str, declared: Any, expected: Any) -> None:
    talk = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": value},
        {"from": "gpt", "value": "2"},
    ]
    found = normalised({"conversations": talk, "tools": declared}, "sharegpt")
    if isinstance(expected, str):
        assert found == expected
    else:
        assert found == {"messages": [ASK, expected, RIGHT], **({"tools": declared} if declared else {})}


THOUGHT = {**RIGHT, "content": "<think>\nOne,\ntwo.\n</think>\n\n2", "thinking": "Well."}
DROPPED: dict[str, tuple[str, Row, Row]] = {
    "messages": ("messages", {"messages": [ASK, THOUGHT]}, {"messages": [ASK, RIGHT]}),
    "preference": (
        "preference",
        {"chosen": [ASK, THOUGHT], "rejected": [ASK, WRONG]},
        {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]},
    ),
    "rated": (
        "rated",
        {"prompt": [ASK], "completion": [THOUGHT], "label": True},
        {"prompt": [ASK], "completion": [RIGHT], "label": True},
    ),
    "prompt": ("prompt", {"prompt": [ASK, THOUGHT, ASK]}, {"prompt": [ASK, RIGHT, ASK]}),
    "texts": (
        "prompt-completion",
        {"prompt": "<think>x</think>y", "completion": "<think>a</think> b"},
        {"prompt": "<think>x</think>y", "completion": "b"},
    ),
    "pair of texts": (
        "preference",
        {"prompt": "x", "chosen": "<think>a</think>b", "rejected": "c <think>a</think>"},
        {"prompt": "x", "chosen": "b", "rejected": "c <think>a</think>"},
    ),
    "thinking without an end": (
        "prompt-completion",
        {"prompt": "x", "completion": "<think>a"},
        {"prompt": "x", "completion": "<think>a"},
    ),
    "plain text": ("text", {"text": "<think>a</think>b"}, {"text": "<think>a</think>b"}),
    "what the user writes": (
        "messages",
        {"messages": [{**ASK, "content": "<think>a</think>b"}, RIGHT]},
        {"messages": [{**ASK, "content": "<think>a</think>b"}, RIGHT]},
    ),
}


@pytest.mark.parametrize(("row_format", "row", "expected"), DROPPED.values(), ids=DROPPED)
def test_reasoning_can_be_dropped(row_format: str, row: Row, expected: Row) -> None:
    assert normalised(row, row_format, reasoning=False) == expected


def test_an_answer_of_nothing_but_reasoning_is_empty_without_it() -> None:
    row = {"prompt": "x", "completion": "<think>a</think>"}
    assert normalised(row, "prompt-completion", reasoning=False) == "completion is empty"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text("ab", max_size=2), JSON, max_size=3), st.booleans())
def test_arguments_are_the_same_object_or_the_same_without_nulls(arguments: Row, is_text: bool) -> None:
    given = json.dumps(arguments) if is_text else arguments
    found = normalize.parse_tool_calls([{"name": "f", "arguments": given}])

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nulls(part) for key, part in value.items() if part is not None}
        return [without_nulls(part) for part in value] if isinstance(value, list) else value

    assert found[0]["function"]["arguments"] == (arguments if is_text else without_nulls(arguments))


@given(JSON | st.text(max_size=20))
def test_whatever_tools_and_calls_are_it_is_json_or_a_reason(value: Any) -> None:
    for parse in (normalize.parse_tool_calls, normalize.parse_tools):
        with contextlib.suppress(RowError):
            found = parse(value)
            assert json.loads(json.dumps(found)) == found


def test_a_parquet_file_has_no_calls_with_arguments_of_others(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": given}]},
            ],
            "tools": [{"name": name, "parameters": {"properties": {key: {"type": "string"} for key in given}}}],
        }
        for number in range(20)
        for name, given in [("add", {"a": str(number)}), ("find", {"what": str(number)})]
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    store = str(tmp_path / "store")

    found = split(store, str(tmp_path / "rows.parquet"), split={"eval": 0.3})

    written = [row for side in sides(store, found).values() for row in side]
    assert len(written) == 40
    for row in written:
        function = row["messages"][1]["tool_calls"][0]["function"]
        assert list(function["arguments"]) == (["a"] if function["name"] == "add" else ["what"])
        assert list(row["tools"][0]["function"]["parameters"]["properties"]) == list(function["arguments"])


def test_rows_with_tools_and_rows_without_are_one_data_set(tmp_path: Path) -> None:
    def row(number: int) -> Row:
        talk = {"messages": [{**ASK, "content": f"{number}?"}, {**RIGHT, "reasoning": "Hm."}]}
        return {**talk, "tools": json.dumps([BARE])} if number % 2 else talk

    source = write(tmp_path / "rows.jsonl", [row(number) for number in range(30)])
    store = str(tmp_path / "store")

    found = split(store, source, split={"eval": 0.3}, reasoning="drop")

    written = [each for side in sides(store, found).values() for each in side]
    assert sum("tools" in each for each in written) == 15
    assert {each["messages"][1]["content"] for each in written} == {"2"}
    assert not any("reasoning_content" in each["messages"][1] for each in written)
    assert found["sources"][0]["columns"] == {"messages": "messages", "tools": "tools"}


def test_a_picture_is_kept_with_its_line(tmp_path: Path) -> None:
    good = [{"messages": [{**ASK, "content": str(number)}, RIGHT]} for number in range(30)]
    seen = {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, RIGHT]}
    source = write(tmp_path / "rows.jsonl", [*good[:4], seen, *good[4:]])
    store = str(tmp_path / "store")

    split(store, source, split={"eval": 0.3}, max_rejected=0.5)

    (row,) = rejected(store)
    assert (row["line"], row["reason"]) == (5, "message 1 has a part of type 'image', and only text is learned")


def test_tools_that_are_to_be_kept_as_text_too_are_refused() -> None:
    layout = ColumnMapping(
        format="messages", columns={}, beside={"tools": "tools"}, extra_columns=("tools",)
    )  # which are a list already
    found = normalized({"messages": [ASK, RIGHT], "tools": [ADD]}, layout)
    assert found == "column 'tools' declares the row's tools, which are kept without data.extra_columns"


GLAIVE = {
    "arguments in double quotes": ('<functioncall> {"name": "add", "arguments": {"a": 1}}', called(call({"a": 1}))),
    "arguments in single quotes": (
        '<functioncall> {"name": "add", "arguments": \'{"a": "it\\\'s"}\'} <|endoftext|>',
        called(call({"a": "it's"})),
    ),
    "words before": ('Sure. <functioncall> {"name": "add", "arguments": {}}', called(call({}), content="Sure.")),
    "what does not parse": (
        '<functioncall> {"name": "add", ',
        "message 2 has tool_calls that are not JSON of a name and arguments",
    ),
}


@pytest.mark.parametrize(("said", "expected"), GLAIVE.values(), ids=GLAIVE)
def test_a_conversation_written_as_glaive_writes_it(said: str, expected: Any) -> None:
    chat = f"USER: 1+1?\n\n\nASSISTANT: {said}\n\n\nFUNCTION RESPONSE: 2\n\n\nASSISTANT: 2 <|endoftext|>\n\n\n"
    system = f"SYSTEM: You may call functions -\n{json.dumps(BARE, indent=4)}\n\n{json.dumps({'name': 'b'})}"
    found = normalised({"conversations": chat, "system": system}, "sharegpt")
    if isinstance(expected, str):
        assert found == expected
    else:
        declared = [ADD, {"type": "function", "function": {"name": "b"}}]
        talk = [ASK, expected, {"role": "tool", "content": "2"}, RIGHT]
        assert found == {"messages": talk, "tools": declared}


def test_glaives_system_stays_where_it_declares_nothing() -> None:
    row = {"conversations": "USER: 1+1?\n\n\nASSISTANT: 2 <|endoftext|>", "system": "SYSTEM: Be kind.\n"}
    assert normalised(row, "sharegpt") == {"messages": [{"role": "system", "content": "Be kind."}, ASK, RIGHT]}


def test_columns_that_are_not_meant_are_mapped_away(tmp_path: Path) -> None:
    rows = [{"messages": [{**ASK, "content": str(n)}, RIGHT], "tools": ["saw"], "system": "x"} for n in range(30)]
    source, store = write(tmp_path / "rows.jsonl", rows), str(tmp_path / "store")

    found = split(store, source, split={"eval": 0.3}, columns={"tools": "none", "system": "none"})

    assert all(row.keys() == {"messages"} for side in sides(store, found).values() for row in side)
    assert found["rejected"] == 0


def test_tools_and_arguments_keep_the_order_of_their_keys(tmp_path: Path) -> None:
    tool = {"name": "pay", "parameters": {"type": "object", "properties": {"to": {}, "amount": {}, "at": {}}}}
    calls = [{"name": "pay", "arguments": {"to": "Ada", "amount": 3, "at": "noon"}}]
    rows = [
        {"messages": [ASK, {"role": "assistant", "tool_calls": calls}, {**RIGHT, "content": str(k)}], "tools": [tool]}
        for k in range(20)
    ]
    store = str(tmp_path / "store")
    found = sides(store, split(store, write(tmp_path / "rows.jsonl", rows), split={"eval": 0.3}))["train"][0]
    assert list(found["tools"][0]) == ["type", "function"]
    assert json.dumps(found["tools"][0]["function"]) == json.dumps(tool)
    assert list(found["messages"][1]["tool_calls"][0]["function"]["arguments"]) == ["to", "amount", "at"]


@pytest.mark.parametrize("name", ["images", "image", "audios"])
def test_pictures_beside_messages_are_refused_and_empty_columns_are_not(name: str) -> None:
    row = {"messages": [{**ASK, "content": "<image>What is it?"}, RIGHT], name: ["a.png"]}
    assert normalised(row) == f"column {name!r} holds pictures or sound, and only text is learned"
    assert normalised({**row, name: []}) == {"messages": row["messages"]}
    assert normalised({"text": "a", name: ["a.png"]}, "text") == {"text": "a"}
