"""Columns by path: what lies within a column."""

from typing import Any

import pytest

from baton.data import schema
from tests.data.splitting import rejected, sides, split, write

ROW: dict[str, Any] = {
    "id": 1,
    "reward_model": {"ground_truth": "2", "style": {"name": "rule"}},
    "answers": {"text": ["two", "2"]},
    "a.b": "dotted",
    "c": {"d.e": "inner"},
}
FOUND = {
    "id": 1,
    "reward_model.ground_truth": "2",
    "reward_model.style.name": "rule",
    "answers.text": ["two", "2"],
    "answers.text.1": "2",
    "answers.text.2": None,
    "answers.text.x": None,
    "answers.text.-1": None,
    "answers.score": None,
    "id.x": None,
    "none": None,
    "a.b": "dotted",
    "c.d.e": "inner",
    "": None,
    ".": None,
}


@pytest.mark.parametrize("path", FOUND)
def test_what_is_at_a_path(path: str):
    assert schema.value_at(ROW, path) == FOUND[path]


def test_paths_that_a_row_has():
    found = set(schema.column_paths(ROW))

    assert found >= {path for path, value in FOUND.items() if value is not None}
    assert schema.outermost_columns(sorted(found)) == ["a.b", "answers", "c", "id", "reward_model"]


def test_a_value_of_many_parts_is_not_gone_through():
    assert len(set(schema.column_paths({"tokens": list(range(10**6))}))) <= schema.WIDEST + 1


def test_rows_are_split_by_what_lies_within_them(tmp_path):
    rows = [
        {"q": {"a": {"b": {"c": f"{at}+1?"}}}, "r": {"truth": at + 1}, "group": {"name": f"g{at % 3}"}}
        for at in range(30)
    ]
    source = write(tmp_path / "rows.jsonl", [*rows, {"q": "?"}])
    columns = {"prompt": "q.a.b.c", "answer": "r.truth"}

    found = split(
        str(tmp_path / "store"), source, method="grpo", columns=columns, max_rejected=0.1,
        split={"eval": 0.3, "group_by": "group.name"}, seed=1,
    )  # fmt: skip

    written = [row for side in sides(str(tmp_path / "store"), found).values() for row in side]
    assert sorted(int(row["answer"]) for row in written) == list(range(1, 31))
    assert all(row["prompt"] == f"{int(row['answer']) - 1}+1?" for row in written)
    assert [row["reason"] for row in rejected(str(tmp_path / "store"))] == ["column 'q.a.b.c' is missing"]
