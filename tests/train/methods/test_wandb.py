"""Weights & Biases without a network: what a chunk logs is in its folder below the run, for `wandb sync` to send."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train.live import LiveReport, Meter, ObservedChunk, WandbRun
from tests.support import tiny

pytest.importorskip("wandb", reason="the extra wandb is not installed")

HEAD, BLOCK = 7, 32768


def records(path: Path) -> Iterator[Any]:
    """Yields what a `.wandb` file holds: LevelDB's log format with a Protobuf message in each record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), HEAD, b""
    while at + HEAD <= len(data):
        if (left := BLOCK - at % BLOCK) < HEAD:  # no record begins so near to a block's end
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(message)
            message = b""


def logged(path: Path) -> Iterator[dict[str, Any]]:
    """Yields what was logged, step by step."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            yield {**items, "step": record.history.step.num}


def test_the_runs_folder_holds_what_was_logged(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = build("sft", training={"max_steps": 3})
    run = Run(Storage(str(tmp_path / "store")), "r")
    recipe = tiny.recipe(str(tmp_path), tracking={"wandb": "my-project"})
    run.create(recipe)
    run.put("tokens.json", {"prefix": "data/x/tokens", "tokens": 480, "train": 24})
    observed = ObservedChunk(run=run, recipe=recipe, index=1, folder=str(tmp_path), live=dict, seconds=dict)
    report = LiveReport(Meter(run, recipe), [WandbRun(observed, "my-project")], dict)
    trainer.add_callback(report)
    trainer.train()
    report.close()
    (path,) = (tmp_path / "store").rglob("*.wandb")
    assert path.relative_to(run.storage.key(run.path("wandb"))).parts[0].startswith("offline-run-")
    found = list(logged(path))
    expected = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(entry["step"], entry["loss"]) for entry in found] == [(entry["step"], entry["loss"]) for entry in expected]
    assert all(entry["tokens_per_second"] > 0 for entry in found)
    (about,) = (record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    assert (about.project, about.run_id) == ("my-project", "r")
