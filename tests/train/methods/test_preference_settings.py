"""Settings of DPO, and dropout in all methods that switch it off: each reaches TRL and changes what is learned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.methods.conftest import DIFFERENT, Train

STEPS: dict[str, Any] = {"max_steps": 3}
"""In the first step model and reference are the same, where some losses have the same slope."""

LOSSES = (
    "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
    "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
SMOOTHED = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}}


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_another(loss: str, train: Train) -> None:
    found = train("dpo", training=STEPS, loss=loss, **SMOOTHED.get(loss, {}))
    assert found.trainer.loss_types == [loss]
    assert found.distance(train("dpo", training=STEPS)) > DIFFERENT


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "f_divergence forward_kl": ({"f_divergence": "forward_kl"}, {"f_divergence_type": "forward_kl"}),
    "f_divergence js": ({"f_divergence": "js_divergence"}, {"f_divergence_type": "js_divergence"}),
    "f_divergence alpha": ({"f_divergence": "alpha_divergence"}, {"f_divergence_type": "alpha_divergence"}),
    "weighting": ({"weighting": True}, {"use_weighting": True}),
    "length_desensitization": ({"length_desensitization": 0.5}, {"ld_alpha": 0.5}),
}


@pytest.mark.parametrize(("changed", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_setting_reaches_the_trainer_and_changes_what_is_learned(
    changed: dict[str, Any], expected: dict[str, Any], train: Train
) -> None:
    found = train("dpo", training=STEPS, **changed)
    assert {name: getattr(found.trainer, name) for name in expected} == expected
    assert found.distance(train("dpo", training=STEPS)) > DIFFERENT


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo"])
def test_dropout_is_switched_off_and_on(method: str, train: Train, varied_base: str, tmp_path: Path) -> None:
    """The base drops half of its attention, by a number rather than a layer."""
    undropped = str(shutil.copytree(varied_base, tmp_path / "undropped"))
    config = json.loads((tmp_path / "undropped/config.json").read_text(encoding="utf-8"))
    (tmp_path / "undropped/config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}), encoding="utf-8")
    off, on = (train(method, disable_dropout=disabled) for disabled in (True, False))
    never = train(method, disable_dropout=False, base=undropped)
    assert off.distance(on) > DIFFERENT
    assert off.distance(never) < DIFFERENT
