"""A dataset of JSON lines is refused as a whole, because a column holds numbers and texts.

Issue: https://github.com/huggingface/datasets/issues/6460
Upstream: reproduced. The thread's file, lists of numbers and texts, loads since datasets 5.2, also tested. A type that
    changes after ten megabytes still ends with an error that names neither line nor column.
Baton: reads line by line. Unused columns may hold anything; a row with another type in its own column is left out, with
    file, line, column and type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetGenerationError

from baton.errors import UserError
from tests.data import splitting

TAGGED = [{"text": f"row {n}", "ner": [[n, n + 4, "Protein"], [15, "x", n]]} for n in range(40)]
LATE = [{"q": "ask " * 5000, "answer": 7 if n < 600 else "seven"} for n in range(601)]
"""Twelve megabytes of numbers and a text."""


def load(folder: Path, rows: list[dict[str, Any]]) -> datasets.Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def test_upstream_loads_what_is_mixed_from_the_start(tmp_path: Path) -> None:
    assert load(tmp_path, TAGGED)[3] == TAGGED[3]


def test_upstream_refuses_what_is_mixed_later(tmp_path: Path) -> None:
    with pytest.raises(DatasetGenerationError) as raised:
        load(tmp_path, LATE)
    words = f"{raised.value} {raised.value.__cause__}"
    assert "seven" in words
    assert "601" not in words
    assert "answer" not in words


def test_baton_reads_rows_beside_a_mixed_column(tmp_path: Path) -> None:
    found = splitting.split(str(tmp_path / "store"), splitting.write(tmp_path / "rows.jsonl", TAGGED))
    sides = splitting.sides(str(tmp_path / "store"), found)
    assert splitting.texts([row for rows in sides.values() for row in rows]) == splitting.texts(TAGGED)


def test_baton_names_the_row_of_another_type(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    rows = [{"q": f"ask {n}", "answer": f"number {n}" if n != 36 else 36} for n in range(40)]
    source = splitting.write(tmp_path / "rows.jsonl", rows)
    own = {"columns": {"prompt": "q", "completion": "answer"}, "split": {"eval": 0.3}}
    with pytest.raises(UserError, match=r"rows\.jsonl line 37: column 'answer' is a int, expected text"):
        splitting.split(store, source, "strict", **own, max_rejected=0.0)
    found = splitting.split(store, source, "lenient", **own, max_rejected=0.1)
    sides = splitting.sides(store, found)
    assert sum(len(side) for side in sides.values()) == 39
    (left,) = splitting.rejected(store, "lenient")
    assert left["line"] == 37
