"""Frozen weights lie in files of their own, which are the same in each checkpoint, and the folder is as any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import load_sharded_checkpoint

from baton.models import trainable as frozen
from baton.models.trainable import freeze
from baton.recipe.training import Trainable
from tests.support import tiny


def model(base: str, **trainable: Any) -> Any:
    """Returns the model of a base, frozen but for a part of it."""
    loaded = AutoModelForCausalLM.from_pretrained(base)
    freeze(loaded, Trainable(**trainable))
    return loaded


def files(folder: Path) -> dict[str, bytes]:
    """Returns the files with weights."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def step(trained: Any) -> None:
    """Changes the weights that are trained."""
    with torch.no_grad():
        for weight in trained.parameters():
            if weight.requires_grad:
                weight += 0.5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("trainable", [{"last_layers": 1}, {"patterns": ["embed_tokens"]}, {"patterns": ["norm"]}])
def test_the_folder_is_read_as_any_other(trainable: dict[str, Any], tied: bool, tmp_path: Path):
    trained = model(tiny.make_base(tmp_path / "base", tied=tied), **trainable)
    save = frozen.save_frozen_separately(trained, trained.save_pretrained)

    save(str(tmp_path / "first"))
    step(trained)
    save(str(tmp_path / "second"))

    first, second = files(tmp_path / "first"), files(tmp_path / "second")
    assert list(first) == list(second) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [first[name] == second[name] for name in first] == [True, False]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "second").state_dict()
    loaded = model(str(tmp_path / "base"), **trainable)
    load_sharded_checkpoint(loaded, str(tmp_path / "second"), strict=False)
    loaded.tie_weights()
    for name, value in trained.state_dict().items():
        assert torch.equal(back[name], value)
        assert torch.equal(loaded.state_dict()[name], value)
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == sorted(
        [*second, "config.json", "generation_config.json", "model.safetensors.index.json"]
    )


def test_frozen_and_trained_weights_are_never_in_one_file(tiny_base: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(frozen, "SHARD_SIZE", "10KB")
    trained = model(tiny_base, last_layers=1)
    frozen.save_frozen_separately(trained, trained.save_pretrained)(str(tmp_path), max_shard_size="4KB")

    kept = frozen.frozen_names(trained)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    held: dict[str, set[bool]] = {}
    for name, file in index.items():
        held.setdefault(file, set()).add(name in kept)
    assert index.keys() == trained.state_dict().keys()
    assert all(len(kinds) == 1 for kinds in held.values())
    assert len(held) == len(files(tmp_path)) > 4
    for file in held:
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert {name for name, where in index.items() if where == file} == set(opened.keys())


def test_where_nothing_is_frozen_nothing_changes(tiny_base: str, tmp_path: Path):
    trained = AutoModelForCausalLM.from_pretrained(tiny_base)
    frozen.save_frozen_separately(trained, trained.save_pretrained)(str(tmp_path / "apart"))
    trained.save_pretrained(str(tmp_path / "plain"))
    assert files(tmp_path / "apart") == files(tmp_path / "plain")
    assert list(files(tmp_path / "apart")) == ["model.safetensors"]
