"""Replay: new rows, and a share of those that were learnt, drawn by content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.data.split import split_data
from baton.errors import UserError
from baton.recipe import load
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.data.splitting import sides, write

OLD = [{"text": f"learnt before, row {number}"} for number in range(200)]
NEW = [{"text": f"new since then, row {number}"} for number in range(40)]


def _split(store: str, source: Path, name: str, learnt: list[str], replay: float = 0.2) -> dict[str, Any]:
    recipe = {
        "name": "tiny",
        "store": store,
        "model": {"base": "org/model"},
        "data": {"source": str(source)},
        "retrain": {"learnt": learnt, "replay": replay},
        "tracking": {"mlflow": None},
    }
    return split_data(load.validate(recipe, origin="r.yaml"), name)


def _texts(rows: list[dict[str, Any]]) -> set[str]:
    return {row["text"] for row in rows}


def test_new_rows_and_a_share_of_the_old_are_trained_on_and_no_held_out_row_moves(store: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write(source, OLD)
    first = _split(store, source, "first", [])
    before = sides(store, first)
    write(source, NEW[:20] + OLD + NEW[20:])
    found = _split(store, source, "second", [first["digest"]])
    after = sides(store, found)
    assert _texts(before["eval"]) < _texts(after["eval"])
    assert not _texts(before["eval"]) & _texts(after["train"])
    new = _texts(after["train"]) & _texts(NEW)
    old = _texts(after["train"]) - new
    assert new == _texts(NEW) - _texts(after["eval"])
    assert len(old) == round(len(new) / 4)  # a fifth of the whole
    assert old < _texts(before["train"])

    write(source, OLD + NEW)  # the same rows in another order
    assert _texts(sides(store, _split(store, source, "third", [first["digest"]]))["train"]) == new | old


def test_each_retraining_replays_others_and_not_what_is_gone(store: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write(source, OLD)
    first = _split(store, source, "first", [])
    write(source, OLD[:100] + NEW)
    second = _split(store, source, "second", [first["digest"]])
    replayed = _texts(sides(store, second)["train"]) - _texts(NEW)
    assert replayed <= _texts(OLD[:100])
    write(source, OLD[:100] + NEW + [{"text": f"newest, row {number}"} for number in range(40)])
    third = _split(store, source, "third", [first["digest"], second["digest"]])
    again = {text for text in _texts(sides(store, third)["train"]) if not text.startswith("newest")}
    assert again
    assert again != replayed
    assert again <= _texts(OLD[:100]) | _texts(NEW)


def test_without_replay_only_what_is_new_is_trained_on(store: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write(source, OLD)
    first = _split(store, source, "first", [])
    write(source, OLD + NEW)
    found = _split(store, source, "second", [first["digest"]], replay=0)
    assert _texts(sides(store, found)["train"]) <= _texts(NEW)


def test_nothing_new_and_what_was_learnt_being_gone_are_one_message(store: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write(source, OLD)
    first = _split(store, source, "first", [])
    write(source, OLD[:100])
    with pytest.raises(UserError, match=r"no training row that the accepted model has not learnt.*retrain\.start to"):
        _split(store, source, "second", [first["digest"]])
    write(source, OLD + NEW)
    with pytest.raises(UserError, match=r"data/0123/split is missing.*retrain\.start to base"):
        _split(store, source, "third", ["0123"])


def test_a_run_that_replays_is_another_one(store: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write(source, OLD)
    first = _split(store, source, "first", [])
    write(source, OLD + NEW)
    _split(store, source, "second", [first["digest"]])
    with pytest.raises(UserError, match=r"another recipe: retrain\.replay: 0\.2 → 0\.3"):
        _split(store, source, "second", [first["digest"]], replay=0.3)
    assert Run(Storage(store), "second").recipe().retrain.learnt == [first["digest"]]
