"""A plain TRL script on the same rows has the same losses, bit for bit, and ends on the same weights.

The script tokenizes for itself and never stops; the run is prepared by its stages and trains in four processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from baton.store.manifest import read_manifest
from tests.exactness import matrix, plain
from tests.exactness.matrix import Cell

CELLS = {
    "sft": Cell("sft", "full", "beside plain TRL", steps=9),
    "sft-lora": Cell("sft", "lora", "beside plain TRL", {"adapter": {**matrix.LORA, "dropout": 0.3}}, steps=9),
    "dpo": Cell("dpo", "full", "beside plain TRL", steps=9),
    "kto": Cell("kto", "full", "beside plain TRL", steps=9),
    "reward": Cell("reward", "full", "beside plain TRL", steps=9),
    "distillation": Cell("distillation", "full", "beside plain TRL", steps=9),
    "grpo": Cell("grpo", "full", "beside plain TRL", {"data": {"max_samples": None}}, steps=9),
}


def split_rows(run: Run) -> str:
    """Path of the rows that the run trains on, as texts."""
    prefix = f"data/{run.require('data.json')['digest']}/split"
    manifest = read_manifest(run.storage, prefix)
    assert manifest
    return str(run.storage.uri(manifest.path(prefix, "train.jsonl")))


QUICK = ("sft", "sft-lora", "dpo", "grpo")


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CELLS])
def test_chunks_have_the_losses_of_a_plain_script(name: str, tmp_path: Path, base_model: str, legs: Any) -> None:
    from safetensors.numpy import load_file

    source = matrix.write_rows(tmp_path)
    whole = matrix.recipe(CELLS[name], str(tmp_path / "store"), base_model, source)
    run = legs.prepare(legs.changed(whole, chunks__count=4, training__micro_batch_size=2), f"{name}-chunks")
    legs.train(run)
    output = tmp_path / "plain"
    code, printed = legs.leg(plain.train, name, base_model, split_rows(run), str(output))
    assert code == 0, printed
    theirs = [tuple(entry) for entry in json.loads((output / "losses.json").read_text())]
    assert len(theirs) == 9
    assert len({loss for _, loss in theirs}) > 5
    assert legs.losses(run) == theirs
    assert run.plan().targets == (3, 5, 7, 9)
    last = CheckpointStore(run).uri(legs.final(run))
    file = "adapter_model.safetensors" if name == "sft-lora" else "model.safetensors"
    ours, scripts = load_file(f"{last}/{file}"), load_file(output / file)
    assert ours.keys() == scripts.keys()
    assert [key for key in ours if (ours[key] != scripts[key]).any()] == []
