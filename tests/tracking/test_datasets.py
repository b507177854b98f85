"""The rows as MLflow's data sets: their source in MLflow's own words, their columns, sides and numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlflow import data
from mlflow.types import Schema

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import SplitCounts
from baton.tracking import tracking_run

DIGEST = "0123456789abcdef" * 4


def _recipe(source: Any) -> Recipe:
    document = {
        "name": "named",
        "model": {"from_scratch": {}, "tokenizer": {"train": {}}},
        "data": {"source": source},
    }
    return load.validate(document, origin="test")


def _counts(**changes: Any) -> SplitCounts:
    counts = {"rows": 12, "train": 9, "eval": 3, "test": 0, "digest": DIGEST, **changes}
    return SplitCounts.read(counts, "test")


@pytest.mark.parametrize(
    ("source", "name", "kind", "where"),
    [
        ("builtin:stdlib-docs", "stdlib-docs", "local", {"uri": "builtin:stdlib-docs"}),
        ("/data/rows.jsonl", "rows.jsonl", "local", {"uri": "/data/rows.jsonl"}),
        ("s3://bucket/in/rows.jsonl", "rows.jsonl", "s3", {"uri": "s3://bucket/in/rows.jsonl"}),
        ("hf://datasets/org/chat?split=train", "org/chat", "hugging_face", {"path": "org/chat", "split": "train"}),
        (["a.jsonl", {"uri": "b.jsonl", "weight": 2}], "named", "local", {"uri": "a.jsonl, b.jsonl"}),
    ],
    ids=["builtin", "file", "bucket", "hub", "several"],
)
def test_a_source_is_one_that_mlflow_reads(source: Any, name: str, kind: str, where: dict[str, Any]) -> None:
    train, held_out = tracking_run.dataset_inputs(_recipe(source), _counts())
    assert [each.dataset.name for each in (train, held_out)] == [f"{name}-train", f"{name}-eval"]
    assert [[(tag.key, tag.value) for tag in each.tags] for each in (train, held_out)] == [
        [("mlflow.data.context", "train")],
        [("mlflow.data.context", "eval")],
    ]
    assert (train.dataset.digest, train.dataset.source_type) == (DIGEST[:12], kind)
    read = data.get_source(train).to_dict()
    assert {key: read[key] for key in where} == where
    assert json.loads(held_out.dataset.profile) == {"num_rows": 3, "digest": DIGEST}


def test_a_side_without_rows_is_none_and_neither_is_a_split_of_an_older_baton() -> None:
    assert set(tracking_run.dataset_keys(_recipe("rows.jsonl"), _counts(test=2))) == {"train", "eval", "test"}
    assert set(tracking_run.dataset_keys(_recipe("rows.jsonl"), _counts(eval=0))) == {"train"}
    assert tracking_run.dataset_keys(_recipe("rows.jsonl"), SplitCounts.read({"train": 9}, "test")) == {}


def test_columns_are_a_schema_of_mlflows() -> None:
    turns = [{"role": "user", "content": "hi"}]
    rows = [{"messages": turns, "score": 1.5, "n": 3, "ok": True}, {"messages": turns, "note": None, "empty": []}]
    schema = Schema.from_json(json.dumps(tracking_run.dataset_columns(rows)))
    assert schema.input_names() == ["messages", "score", "n", "ok", "note", "empty"]
    assert [column.required for column in schema] == [True, False, False, False, False, False]
    assert str(schema.inputs[0].type) == "Array({content: string (required), role: string (required)})"
    assert [column.type.name for column in schema.inputs[1:]] == ["double", "long", "boolean", "string", "string"]
