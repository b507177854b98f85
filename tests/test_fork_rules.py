"""What a fork may change, and how that is said."""

from __future__ import annotations

from typing import Any

import pytest

from baton import fork
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe

BASE: dict[str, Any] = {
    "name": "r",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
    "adapter": {"type": "lora"},
    "training": {"max_steps": 40, "groups": [{"pattern": "lora_A", "learning_rate": 1e-4}]},
    "evaluation": {"every": 10},
}


def recipe(*overrides: str) -> Recipe:
    """The recipe with changes."""
    return load.with_overrides(load.validate(BASE, origin="test"), overrides)


@pytest.mark.parametrize(
    "override",
    [
        "training.learning_rate=1e-3",
        "training.lr_scheduler=cosine",
        "training.lr_scheduler_options={num_cycles: 1}",
        "training.warmup_steps=3",
        "training.max_steps=50",
        "training.weight_decay=0.1",
        "training.micro_batch_size=2",
        "training.groups=[{pattern: lora_A, learning_rate: 2e-4}]",
        "adapter.dropout=0.1",
        "evaluation.every=5",
        "chunks.count=4",
        "chunks.keep.last=5",
        "resources.gpus=2",
        "export.formats=[adapter]",
        "tracking.mlflow=http://elsewhere",
        "evaluation.max_new_tokens=9",
    ],
)
def test_what_is_read_anew_at_each_step_or_decides_no_bits_is_taken_over(override: str) -> None:
    path = override.partition("=")[0]
    found = fork.require_warm(recipe(), recipe(override))
    assert len(found) == 1
    assert next(iter(found)) in (path, f"{path}.num_cycles")


def test_a_cadence_by_epoch_takes_the_place_of_one_in_steps() -> None:
    found = fork.require_warm(recipe(), recipe("evaluation={per_epoch: 2}", "chunks.checkpoints_per_epoch=1"))
    assert found == {
        "chunks.checkpoints_per_epoch": [None, 1],
        "evaluation.every": [10, None],
        "evaluation.per_epoch": [None, 2],
    }
    assert "evaluation.per_epoch" in fork.of_state(recipe(), recipe("evaluation={per_epoch: 2}"))


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "data.max_length=64",
        "data.source=other.jsonl",
        "model.dtype=bfloat16",
        "adapter.r=4",
        "adapter.alpha=64",
        "training.batch_size=16",
        "training.optimizer=sgd",
        "training.optimizer_options={momentum: 0.9}",
        "training.lr_scheduler=reduce_lr_on_plateau",
        "training.groups=[{pattern: lora_B, learning_rate: 1e-4}]",
        "training.group_by_length=true",
        "training.early_stopping={patience: 1}",
        "training.lr_find={}",
        "training.threads=3",
        "hooks.loss=mine:loss",
        "training.method=pretrain",
    ],
)
def test_what_the_state_is_made_of_is_refused_by_name(override: str) -> None:
    with pytest.raises(UserError) as caught:
        fork.require_warm(recipe(), recipe(override))
    assert override.partition("=")[0] in str(caught.value)


def test_what_is_in_shards_stays_so_and_what_is_whole_too() -> None:
    def trained(parallel: str) -> Recipe:
        document = {**BASE, "adapter": None, "training": {"max_steps": 40, "micro_batch_size": 1}}
        return load.with_overrides(load.validate(document, origin="test"), [f"training.parallel={parallel}"])

    shards, whole = trained("{strategy: fsdp, processes: 2}"), trained("{strategy: ddp, processes: 2}")
    with pytest.raises(UserError, match="state at that step is in fsdp's shards, and the fork's whole"):
        fork.require_warm(shards, whole)
    with pytest.raises(UserError, match="state at that step is whole, and the fork's in fsdp's shards"):
        fork.require_warm(whole, shards)
    assert fork.require_warm(shards, trained("{strategy: fsdp, processes: 4}"))
    assert fork.require_warm(whole, trained("null"))
    assert fork.require_cold(shards, whole)


def test_the_trainer_is_told_of_what_it_reads() -> None:
    after = recipe("training.learning_rate=1e-3", "chunks.count=2", "evaluation.samples=1", "evaluation.every=5")
    assert fork.of_state(recipe(), after) == {
        "training.learning_rate": [2e-5, 1e-3],
        "evaluation.every": [10, 5],
    }


def test_cold_takes_everything_but_another_model() -> None:
    found = fork.require_cold(recipe(), recipe("seed=1", "training.batch_size=16", "adapter.r=4"))
    assert found == {"seed": [0, 1], "training.batch_size": [8, 16], "adapter.r": [16, 4]}
    for override in ("model.base=org/other", "model.revision=abc", "store.uri=elsewhere"):
        with pytest.raises(UserError, match=override.partition("=")[0]):
            fork.require_cold(recipe(), recipe(override))


def test_a_reward_model_cannot_learn_to_write() -> None:
    scoring = recipe("training.method=reward")
    with pytest.raises(UserError, match="scores texts and writes none"):
        fork.require_cold(scoring, recipe())


def test_a_change_and_its_meaning_are_one_line() -> None:
    found = {"training.max_steps": [40, 80], "training.weight_decay": [0.0, 0.1], "export.formats": [["a"], ["b"]]}
    assert fork.in_words(found, step=30, end=80, warm=True) == [
        "training.max_steps: 40 → 80: the run ends at step 80; the schedule is stretched to that, so the learning rate "
        "jumps at step 30",
        "training.weight_decay: 0.0 → 0.1: applies from step 31; the optimizer's state stays",
        "export.formats: ['a'] → ['b']",
    ]
    assert fork.in_words({"seed": [0, 1]}, step=30, end=0, warm=False) == ["seed: 0 → 1"]


def test_changes_of_a_fork_that_never_trained_add_up() -> None:
    inherited = {"a": [1, 2], "b": [1, 2]}
    assert fork.combined(inherited, {"a": [2, 3], "c": [5, 6]}) == {"a": [1, 3], "b": [1, 2], "c": [5, 6]}
    assert fork.combined(inherited, {"a": [2, 1]}) == {"b": [1, 2]}, "changed back"
