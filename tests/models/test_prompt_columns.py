"""Prompts of messages come out of Arrow as they went in, whatever their tools and arguments are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.data import tokenize
from baton.data.rows import as_content
from baton.models import train_rows

Row = dict[str, Any]

ASK: Row = {"role": "user", "content": "1+1?"}
CALL: Row = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
MORE: dict[str, Row] = {
    "calls": {"prompt": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    "a tool's answer": {"prompt": [ASK, {"role": "tool", "content": "2", "tool_call_id": "c1"}]},
    "names": {"prompt": [{**ASK, "name": "Ada"}]},
    "reasoning": {"prompt": [{"role": "assistant", "content": "2", "reasoning_content": "Hm."}, ASK]},
    "flags": {"prompt": [{**ASK, "train": False}]},
    "tools": {"prompt": [ASK], "tools": [{"type": "function", "function": {"name": "add", "strict": None}}]},
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXT},
    optional={
        "name": TEXT,
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
        "train": st.booleans(),
        "tool_calls": st.lists(st.fixed_dictionaries({"type": TEXT, "function": OBJECT}), min_size=1, max_size=2),
    },
)
ROW = st.fixed_dictionaries(
    {"prompt": st.lists(MESSAGE, min_size=1, max_size=3), "answer": TEXT, "length": st.integers(0, 99)},
    optional={"tools": st.lists(OBJECT, min_size=1, max_size=2)},
)


def through(rows: list[Row], path: Path, *, wide: bool) -> list[Row]:
    """Rows as a trainer reads them after they were written."""
    path.unlink(missing_ok=True)
    assert tokenize.write_rows(str(path), [rows[:1], rows[1:]] if len(rows) > 1 else [rows], wide=wide).rows == len(
        rows
    )
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    return list(train_rows.readable(datasets.Dataset(table)))


@given(st.lists(ROW, min_size=1, max_size=4))
def test_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    rows = [dict(sorted(row.items())) for row in rows]  # as the split writes them
    found = through(rows, tmp_path_factory.getbasetemp() / "rows.arrow", wide=True)
    assert found == [{"tools": None, **row} for row in rows]


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_what_is_more_than_role_and_content_is_seen(more: Row, tmp_path: Path) -> None:
    plain, path = {"prompt": [ASK], "answer": 'It says "name": "x", "tools": ["y"] and "train": true.'}, tmp_path / "a"
    path.write_text(as_content(plain) + "\n")
    assert not train_rows.hold_more([str(path)])
    path.write_text(as_content(plain) + "\n" + as_content({**plain, **more}) + "\n")
    assert train_rows.hold_more([str(path)])


BESIDE: dict[str, Row] = {
    "a column called name": {"name": "x"},
    "a column called tool_call_id": {"tool_call_id": "c1"},
    "a column called train": {"train": True},
    "a column called tool_calls": {"tool_calls": [1]},
    "a column with such keys": {"about": {"tools": ["y"], "name": "x", "train": False}},
    "tools that are null": {"tools": None},
    "a key that is null": {"prompt": [{**ASK, "name": None}]},
    "text for a prompt": {"prompt": "1+1?", "name": "x"},
    "JSON for a text": {"prompt": [{**ASK, "content": '{"name": "x", "tools": ["y"], "train": true}'}]},
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_what_is_no_more_than_role_and_content_is_not(beside: Row, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(as_content({"prompt": [ASK], "answer": "2", **beside}) + "\n")
    assert not train_rows.hold_more([str(path)])


def test_plain_messages_lie_as_trl_has_them(tmp_path: Path) -> None:
    rows = [{"prompt": [ASK], "answer": "2"}, {"prompt": [ASK, ASK], "answer": "3"}]
    assert through(rows, tmp_path / "rows.arrow", wide=False) == rows


def test_texts_lie_as_they_are_beside_a_column_called_tools(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "tools": "hammer"}]
    assert through(rows, tmp_path / "rows.arrow", wide=True) == rows


def test_a_worker_and_a_part_of_the_rows_see_the_same(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    rows = [{"prompt": [{**ASK, "name": str(number)}], "length": number} for number in range(6)]
    path = tmp_path / "rows.arrow"
    tokenize.write_rows(str(path), [rows], wide=True)
    with pa.memory_map(str(path)) as source:
        read = train_rows.readable(datasets.Dataset(pa.ipc.open_stream(source).read_all()))
    chosen = read.select([4, 2])
    assert chosen["length"] == [4, 2]
    loaded = [row for batch in DataLoader(chosen, 1, num_workers=1, collate_fn=list) for row in batch]
    assert loaded == [{**rows[4], "tools": None}, {**rows[2], "tools": None}]
