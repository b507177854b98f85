"""Trials that may share a process, and those that may not."""

from __future__ import annotations

from typing import Any

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.sharing import share
from baton.sweep.search import configured


def _recipe(**values: Any) -> Recipe:
    document = {
        "name": "swept",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl"},
        "training": {"max_steps": 8, "batch_size": 8, "micro_batch_size": 2},
        "adapter": {"r": 8},
        "tracking": {"mlflow": None},
    }
    return configured(load.validate(document, origin="test"), values, "trial")


@pytest.mark.parametrize(
    "values",
    [
        {"training.learning_rate": 1e-3},
        {"training.weight_decay": 0.1},
        {"training.lr_scheduler": "cosine"},
        {"training.batch_size": 4},
        {"training.gradient_checkpointing": True},
        {"adapter.r": 4},
        {"adapter.dropout": 0.1},
        {"adapter.target_modules": "all-linear"},
        {"seed": 9},
    ],
    ids=str,
)
def test_settings_of_the_trainer_alone_share_a_process(values: dict[str, Any]) -> None:
    assert share({"t000": _recipe(), "t001": _recipe(**values)}) == ([["t000", "t001"]], [], [])


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ({"model.base": "org/other"}, "model.base: 'org/model' → 'org/other'"),
        ({"model.dtype": "bfloat16"}, "model.dtype: 'float32' → 'bfloat16'"),
        ({"data.max_length": 99}, "data.max_length: "),
        ({"training.precision": "bf16"}, "training.precision: 'fp32' → 'bf16'"),
        ({"training.threads": 3}, "training.threads: None → 3"),
        ({"training.deterministic": False}, "training.deterministic: True → False"),
        ({"training.optimizer": "sgd"}, "training.optimizer: "),
        ({"adapter": None}, "weights: 'adapter' → 'all'"),
    ],
    ids=str,
)
def test_what_a_process_does_once_separates_trials(values: dict[str, Any], difference: str) -> None:
    groups, apart, (reason,) = share({"t000": _recipe(), "t001": _recipe(**values), "t002": _recipe(seed=3)})
    assert (groups, apart) == ([["t000", "t002"], ["t001"]], [])
    assert reason.startswith(f"another process than t000's trains t001: {difference}")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"hooks.callbacks": ["own:Callback"]}, "hooks.callbacks.0.use: own:Callback is code"),
        ({"model.trust_remote_code": True}, "model.trust_remote_code: True is code"),
        ({"training.compile": True}, "training.compile keeps compiled code"),
        ({"training.micro_batch_size": "auto"}, "training.micro_batch_size auto measures memory"),
        ({"training.liger": True}, "training.liger replaces functions"),
        ({"model.quantization": {"bits": 8}}, "bitsandbytes keeps settings by weight"),
        ({"training.optimizer": "adamw_bnb_8bit"}, "bitsandbytes keeps settings by weight"),
        ({"tracking.prometheus_port": 9000}, "tracking.prometheus_port is free at a process's end"),
        ({"training.parallel": {"strategy": "ddp", "processes": 2}}, "training.parallel needs several"),
    ],
    ids=str,
)
def test_a_trial_that_leaves_something_in_a_process_has_its_own(values: dict[str, Any], why: str) -> None:
    groups, apart, (reason,) = share({"t000": _recipe(), "t001": _recipe(**values)})
    assert (groups, apart) == ([["t000"]], ["t001"])
    assert reason.startswith(f"t001 trains each chunk in a process of its own: {why}")
