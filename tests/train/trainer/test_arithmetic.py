"""TF32 beside any precision: what `TrainingArguments` gets, what torch is set to, and what makes a run another."""

from __future__ import annotations

from typing import Any

import pytest

from baton import fork
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.plan import make_plan
from baton.runs.run import identity
from baton.train import build


def recipe(**training: Any) -> Recipe:
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl"},
        "training": training,
        "resources": {"gpus": 1},
    }
    return load.validate(document, origin="r.yaml")


@pytest.mark.parametrize(
    ("training", "told", "used"),
    [
        pytest.param({}, None, False, id="left-out"),
        pytest.param({"precision": "bf16"}, None, False, id="bf16"),
        pytest.param({"precision": "bf16", "tf32": True}, True, True, id="beside-bf16"),
        pytest.param({"precision": "fp16", "tf32": True}, True, True, id="beside-fp16"),
        pytest.param({"tf32": True}, True, True, id="alone"),
        pytest.param({"precision": "tf32"}, True, True, id="as-precision"),
        pytest.param({"compile": True, "precision": "bf16"}, None, True, id="where-transformers-does"),
        pytest.param({"compile": True, "precision": "fp16"}, None, False, id="where-transformers-does-not"),
        pytest.param({"compile": True, "tf32": False}, False, False, id="refused"),
    ],
)
def test_rounding_is_asked_for_beside_any_precision(training: dict[str, Any], told: bool | None, used: bool) -> None:
    of = recipe(**training)
    options = build.training_arguments(of, make_plan(of, rows=64), "out")
    assert options.get("tf32") is told
    assert (options["bf16"], options["fp16"]) == (of.training.precision == "bf16", of.training.precision == "fp16")
    assert build.uses_tf32(of) is used


def test_runs_from_before_the_setting_are_the_same_ones() -> None:
    before = identity(recipe(precision="bf16"))
    assert "tf32" not in before["training"]
    assert identity(recipe(precision="bf16", tf32=True)) != before
    assert identity(recipe(tf32=True)) == identity(recipe(precision="tf32")) != identity(recipe())
    assert identity(recipe(precision="tf32"))["training"]["precision"] == "tf32"
    assert identity(recipe(compile=True, tf32=False)) != identity(recipe(compile=True))


def test_a_warm_fork_takes_it_over() -> None:
    assert fork._is_taken_over("training.tf32", recipe(precision="bf16"), recipe(precision="bf16", tf32=True))
