"""Code in a checkpoint that lies in the store is found by its pickles alone, and never runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from baton.checkpoint import sharded
from baton.checkpoint.store import CheckpointMeta


class Mkdir:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("holds_code", [True, False])
def test_pickles_in_the_store_are_looked_through(holds_code: bool, in_a_folder: Any, tmp_path: Path) -> None:
    mark, local = tmp_path / "it-ran", tmp_path / "staged"
    local.mkdir()
    torch.save(Mkdir(mark) if holds_code else {"step": 3}, local / "optimizer.pt")
    torch.save({"step": 3}, local / "scheduler.pt")
    (local / "model.safetensors").write_bytes(b"weights")
    dcp.save({"lr": Mkdir(mark) if holds_code else 0.1}, checkpoint_id=local / sharded.OPTIMIZER, no_dist=True)
    store = in_a_folder.store
    writer = store.open_writer(3)
    writer.send(str(local))
    checkpoint, _ = store.commit(3, writer, CheckpointMeta(digest="d"))
    received = store.storage.received
    lines = store.code(checkpoint)
    assert [line.partition(":")[0] for line in lines] == (
        ["optimizer.pt", "optimizer_0/__0_0.distcp"] if holds_code else []
    )
    pickles = sum(entry["size"] for name, entry in checkpoint.manifest.files.items() if name != "model.safetensors")
    assert store.storage.received - received == pickles, "weights stay where they are"
    assert not mark.exists()
