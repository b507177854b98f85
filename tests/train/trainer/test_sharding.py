"""What FSDP's mixin does beside Accelerate, in one process: it restores what is whole, and saves what makes a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.checkpoint.digest import tree_digest
from baton.train import sharding
from baton.train.protocol import Resumption
from baton.train.trainer import exact_class
from tests.support import tiny

ROWS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in tiny.PAIRS]
WHOLE = Resumption(ranks=1, is_reshaped=True)


@pytest.fixture(scope="module")
def make(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Returns what builds a trainer, after some steps."""

    def made(steps: int = 0, **sections: Any) -> Any:
        settings = {"optimizer": "adamw_torch", "max_steps": 2, "learning_rate": 0.01, "weight_decay": 0.1}
        given = tiny.recipe(tiny_base, training=settings, evaluation={"samples": 0}, **sections)
        trainer = tiny.trainer(given, tiny.tokens(given, ROWS), tmp_path_factory.mktemp("out"))
        trainer.train() if steps else trainer.create_optimizer_and_scheduler(2)
        return trainer

    return made


def in_shards(trainer: Any, resumption: Resumption = WHOLE) -> Any:
    """Has a trainer take itself for one of several in shards."""
    trainer.is_fsdp_enabled = True
    trainer.__class__ = exact_class(type(trainer), [sharding.Fsdp])
    trainer.resumption = resumption
    return trainer


def test_only_what_one_process_has_saved_is_split(make: Callable[..., Any]) -> None:
    trainer = in_shards(make())
    assert trainer.splits
    for resumption in (Resumption(ranks=2, is_reshaped=True), Resumption(ranks=1)):
        trainer.resumption = resumption
        assert not trainer.splits


def test_the_optimizer_of_one_process_is_restored(make: Callable[..., Any], tmp_path: Path) -> None:
    trained, fresh = make(2), in_shards(make())
    torch.save(trained.optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(trained.lr_scheduler.state_dict(), tmp_path / "scheduler.pt")
    assert tree_digest(fresh.optimizer.state_dict()) != tree_digest(trained.optimizer.state_dict())
    fresh._load_optimizer_and_scheduler(None)
    assert fresh.lr_scheduler.last_epoch == 0
    fresh._load_optimizer_and_scheduler(str(tmp_path))
    assert tree_digest(fresh.optimizer.state_dict()) == tree_digest(trained.optimizer.state_dict())
    assert tree_digest(fresh.lr_scheduler.state_dict()) == tree_digest(trained.lr_scheduler.state_dict())


def test_whole_weights_are_loaded_before_the_model_is_in_shards(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, fresh = make(2), in_shards(make())
    trained.model.save_pretrained(tmp_path)
    seen: list[tuple[bool, bool]] = []

    def prepare(self: Any, steps: int, loader: Any, checkpoint: str | None) -> str:
        ours, theirs = tiny.weights(self), tiny.weights(trained)
        seen.append((self.is_fsdp_enabled, all(torch.equal(ours[name], theirs[name]) for name in theirs)))
        return "prepared"

    upstream = next(each for each in type(fresh).__mro__ if each.__module__ == "transformers.trainer")
    monkeypatch.setattr(upstream, "_prepare_for_training", prepare)
    assert fresh._prepare_for_training(2, None, None) == "prepared"
    assert fresh._prepare_for_training(2, None, str(tmp_path)) == "prepared"
    assert seen == [(True, False), (True, True)]
    for weight in fresh.model.parameters():
        weight.data.zero_()
    fresh._load_from_checkpoint(str(tmp_path))
    assert not any(weight.any() for weight in fresh.model.parameters()), "which is once"


def test_beside_shards_lies_what_makes_a_model(make: Callable[..., Any], tmp_path: Path) -> None:
    full = in_shards(make())
    full.save_model(str(tmp_path / "full"), _internal_call=True)
    full._join_weights()
    names = set(os.listdir(tmp_path / "full"))
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if name.endswith((".safetensors", ".bin"))]
    adapted = in_shards(make(adapter={"type": "lora", "r": 2, "target_modules": ["q_proj"]}))
    adapted.save_model(str(tmp_path / "adapted"), _internal_call=True)
    adapted._join_weights()
    names = set(os.listdir(tmp_path / "adapted"))
    assert {"adapter_config.json", "tokenizer.json"} <= names
    assert "config.json" not in names
    assert '"inference_mode": true' in (tmp_path / "adapted" / "adapter_config.json").read_text()
    assert not adapted.model.active_peft_config.inference_mode, "a copy's"
    full.is_fsdp_enabled = False
    full.save_model(str(tmp_path / "whole"))
    assert "model.safetensors" in os.listdir(tmp_path / "whole")


def test_other_ranks_write_nothing_beside_shards(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = in_shards(make())
    monkeypatch.setattr(type(trainer.args), "should_save", property(lambda _: False))
    trainer.save_model(str(tmp_path / "none"), _internal_call=True)
    trainer._join_weights()
    assert not (tmp_path / "none").exists()
