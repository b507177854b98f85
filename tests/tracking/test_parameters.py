"""A run's parameters: what its recipe sets and what follows from it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.plan import Plan
from baton.tracking import tracker

QUICKSTART = Path(__file__).parents[2] / "pipelines/recipes/quickstart.yaml"
SECRET = "http://me:secret@mlflow:5000"


def _recipe(**sections: Any) -> Recipe:
    document = {
        "name": "p",
        "model": {"from_scratch": {}, "tokenizer": {"train": {}}},
        "data": {"source": "builtin:stdlib-docs"},
        **sections,
    }
    # As a stage is handed it.
    return load.loads(load.dumps(load.validate(document, origin="test")))


def test_the_quickstarts_are_what_its_file_sets() -> None:
    recipe = load.load(str(QUICKSTART))
    found = tracker.recipe_params(recipe)
    assert found == {
        "seed": "7",
        "model.from_scratch.hidden_size": "128",
        "model.tokenizer.train.vocab_size": "2048",
        "data.source": "builtin:stdlib-docs",
        "data.split.eval": "0.05",
        "data.max_length": "64",
        "data.quality.duplicates": "off",
        "data.quality.leakage": "off",
        "data.quality.near_duplicates": "off",
        "data.quality.truncated_share": "0.1",
        "training.method": "sft",
        "training.batch_size": "16",
        "training.micro_batch_size": "8",
        "training.max_steps": "240",
        "training.learning_rate": "0.002",
        "training.lr_scheduler": "cosine",
        "training.warmup_steps": "10.0",
        "chunks.count": "4",
        "evaluation.samples": "6",
        "evaluation.max_new_tokens": "32",
    }
    assert tracker.recipe_params(load.loads(load.dumps(recipe))) == found


def test_a_setting_of_the_command_line_is_one_and_each_run_has_the_usual() -> None:
    recipe = load.with_overrides(_recipe(), ["training.weight_decay=0.1"])
    assert tracker.recipe_params(recipe) == {
        "seed": "0",
        "data.source": "builtin:stdlib-docs",
        "training.method": "sft",
        "training.batch_size": "8",
        "training.learning_rate": "2e-05",
        "training.weight_decay": "0.1",
    }


def test_no_name_is_one_that_mlflow_refuses_and_no_place_or_password_is_told() -> None:
    recipe = _recipe(
        store={"uri": "s3://somewhere"},
        tracking={"mlflow": SECRET},
        resources={"gpus": 2, "profile": "cuda-small", "image": "mine:1"},
        training={"optimizer_options": {"a<b>": 1}},
    )
    found = tracker.recipe_params(recipe)
    assert {name for name in found if name.startswith("resources")} == {"resources.gpus", "resources.profile"}
    assert found["training.optimizer_options.a_b_"] == "1"
    assert all(re.fullmatch(r"[\w\-. /:]+", name) for name in found)
    assert not any(text in value for value in found.values() for text in ("secret", "somewhere"))


@pytest.mark.parametrize(
    ("training", "name"),
    [({"lr_find": {}}, "training.learning_rate"), ({"micro_batch_size": "auto"}, "training.micro_batch_size")],
    ids=["learning rate", "micro-batch"],
)
def test_what_a_chunk_finds_is_told_by_it_alone(training: dict[str, Any], name: str) -> None:
    recipe = _recipe(training=training)
    assert name not in tracker.recipe_params(recipe)
    found = load.with_overrides(recipe, ["training.micro_batch_size=4", "training.learning_rate=0.125"])
    plan = Plan(rows=80, steps_per_epoch=10, num_steps=10, targets=(5, 10))
    tokens = TokenizedRows(prefix="data/x/tokens", tokens=800)
    resolved = tracker.resolved_params(found, plan, tokens, world_size=1, parameters=100, trainable=40)
    assert resolved == {
        "training.learning_rate": "0.125",
        "training.micro_batch_size": "4",
        "training.gradient_accumulation_steps": "2",
        "parallel.world_size": "1",
        "plan.steps": "10",
        "plan.steps_per_epoch": "10",
        "plan.targets": "5, 10",
        "plan.rows": "80",
        "data.tokens": "800",
        "model.parameters": "100",
        "model.trainable_parameters": "40",
    }
