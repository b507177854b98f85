"""Which files of a checkpoint are looked through for code, and a whole model made of pieces in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from baton.checkpoint import sharded


class Mkdir:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "pytorch_model.bin", "state.pkl"])
def test_every_kind_of_pickle_is_looked_through(name: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "checkpoint", tmp_path / "it-ran"
    folder.mkdir()
    torch.save({"step": 3}, folder / name)
    (folder / "model.safetensors").write_bytes(b"no pickle")
    assert sharded.may_be_pickle(name)
    assert sharded.code_in(str(folder)) == []
    torch.save(Mkdir(mark), folder / name)
    assert sharded.code_in(str(folder)) == [f"{name}: a pickle that holds code (posix.mkdir)"]
    assert not mark.exists()
    (folder / name).write_bytes(b"no pickle")
    (line,) = sharded.code_in(str(folder))
    assert line.startswith(f"{name}: a pickle that holds code (unreadable, ")


def test_shards_may_hold_pickles_and_weights_do_not() -> None:
    assert sharded.may_be_pickle("pytorch_model_fsdp_0/.metadata")
    assert sharded.may_be_pickle("optimizer_0/__0_0.distcp")
    assert not sharded.may_be_pickle("model.safetensors")
    assert not sharded.may_be_pickle("trainer_state.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights in the form of shards, of one process."""
    folder = tmp_path / "checkpoint"
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    dcp.save({"model": weights}, checkpoint_id=folder / sharded.WEIGHTS, no_dist=True)
    for name in ("config.json", "vocab.txt", "scheduler.pt"):
        (folder / name).write_text(name)
    return folder


def test_a_model_in_shards_is_merged_once(checkpoint: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    whole = Path(sharded.as_whole(str(checkpoint), str(scratch)))
    assert whole == scratch / "merged"
    assert {path.name for path in whole.iterdir()} == {"model.safetensors", "config.json", "vocab.txt"}
    with safe_open(whole / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "as Transformers writes it, whose older versions ask for it"
        assert torch.equal(file.get_tensor("a"), torch.arange(6.0).reshape(2, 3))
        assert file.get_tensor("b").dtype == torch.bfloat16
    (whole / "config.json").write_text("another")
    assert sharded.as_whole(str(checkpoint), str(scratch)) == str(whole)
    assert (whole / "config.json").read_text() == "another"
    assert sharded.as_whole(str(whole), str(scratch)) == str(whole), "what is whole is left where it is"


def test_tensors_of_several_weights_are_found_by_their_own_names(checkpoint: Path) -> None:
    found = sharded.tensors(str(checkpoint))
    assert {name: tuple(entry.size) for name, entry in found.items()} == {"a": (2, 3), "b": (4,)}
