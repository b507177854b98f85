"""Settings of GRPO and RLOO: each reaches TRL and changes what is learned."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.train.methods.conftest import DIFFERENT, Train

TWICE = {"num_iterations": 2, "beta": 0.0}
"""Completions are trained on again after the first step has changed the model, so that ratios leave 1."""
SEQUENCE = {**TWICE, "loss": "grpo"}
SLOW: dict[str, Any] = {"learning_rate": 0.003, "max_grad_norm": 0.0}
"""Ratios stay between 0.8 and 1.2, and a gradient's length counts as well as its direction."""

CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "grpo epsilon": ("grpo", TWICE, {"epsilon": 1e-4}, {"epsilon_low": 1e-4, "epsilon_high": 1e-4}),
    "grpo epsilon_high": ("grpo", TWICE, {"epsilon_high": 1e-4}, {"epsilon_low": 0.2, "epsilon_high": 1e-4}),
    "grpo min_p": ("grpo", {}, {"min_p": 0.5}, {"min_p": 0.5}),
    "grpo mask_truncated": ("grpo", {}, {"mask_truncated": True}, {"mask_truncated_completions": True}),
    "grpo scale_rewards batch": ("grpo", {}, {"scale_rewards": "batch"}, {"scale_rewards": "batch"}),
    "grpo scale_rewards none": ("grpo", {}, {"scale_rewards": "none"}, {"scale_rewards": "none"}),
    "grpo importance_sampling": (
        "grpo",
        SEQUENCE,
        {"importance_sampling": "sequence"},
        {"importance_sampling_level": "sequence"},
    ),
    "grpo top_entropy": ("grpo", {}, {"top_entropy": 0.2}, {"top_entropy_quantile": 0.2}),
    "rloo epsilon": ("rloo", TWICE, {"epsilon": 1e-4}, {"epsilon_low": 1e-4, "epsilon_high": 1e-4}),
    "rloo epsilon_high": ("rloo", TWICE, {"epsilon_high": 1e-4}, {"epsilon_low": 0.2, "epsilon_high": 1e-4}),
    "rloo min_p": ("rloo", {}, {"min_p": 0.5}, {"min_p": 0.5}),
    "rloo mask_truncated": ("rloo", {}, {"mask_truncated": True}, {"mask_truncated_completions": True}),
    "rloo normalize_advantages": ("rloo", {}, {"normalize_advantages": True}, {"normalize_advantages": True}),
}
"""Method, what both trainings have, what one has beside, and what its trainer has then."""


@pytest.mark.parametrize(("method", "both", "changed", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_setting_reaches_the_trainer_and_changes_what_is_learned(
    method: str, both: dict[str, Any], changed: dict[str, Any], expected: dict[str, Any], train: Train
) -> None:
    plain, other = (train(method, training=SLOW, **both, **own) for own in ({}, changed))
    assert {name: getattr(other.trainer, name) for name in expected} == expected
    assert plain.moved() > 0
    assert other.distance(plain) > DIFFERENT


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize(("setting", "figure"), [("epsilon", "low_mean"), ("epsilon_high", "high_mean")])
def test_a_narrower_range_clips_more_ratios(method: str, setting: str, figure: str, train: Train) -> None:
    plain, narrow = (train(method, training=SLOW, **TWICE, **own) for own in ({}, {setting: 1e-4}))
    name = f"clip_ratio/{figure}"
    assert max(narrow.logged(name)) > max(plain.logged(name))
    assert narrow.logged(name)[0] == 0, "in the first step, nothing has changed yet"


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_of_tokens_below_the_most_likely_none_is_left_at_min_p_1(method: str, train: Train) -> None:
    """All completions of a prompt are the same then, and none is better than the others."""
    greedy = train(method, training=SLOW, beta=0.0, min_p=1.0)
    assert greedy.logged("reward_std") == [0, 0]
    assert greedy.moved() == 0
    assert min(train(method, training=SLOW).logged("reward_std")) > 0


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_completions_end_after_any_number_of_tokens(method: str, train: Train) -> None:
    """Without this the base would not tell losses and truncation apart."""
    plain = train(method, training=SLOW)
    assert 0 < statistics.mean(plain.logged("completions/clipped_ratio")) < 1


LOSSES = ["grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
FAR: dict[str, Any] = {"learning_rate": 0.1, "max_grad_norm": 0.0, "micro_batch_size": 4}
"""Ratios leave 1 by far, and a step has two micro-batches of which losses take their means in different ways."""
SAMPLED = {"luspo": {"importance_sampling": "sequence"}}


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_another(loss: str, train: Train) -> None:
    found, *others = (
        train("grpo", training=FAR, **TWICE, **SAMPLED.get(name, {}), loss=name)
        for name in (loss, *(name for name in ("dapo", *LOSSES) if name != loss))
    )
    assert found.trainer.loss_type == loss
    for other in others:
        assert found.distance(other) > DIFFERENT, other.trainer.loss_type
