"""The guard: what is out of bounds, and what a skipped step leaves as it was."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from baton import fork
from baton.checkpoint.digest import tree_digest
from baton.errors import SkipError, UserError
from baton.runs.run import identity
from baton.train import state
from baton.train.guard import is_beyond
from tests.support import tiny

STEADY = [2.0] * 10
ROWS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in tiny.PAIRS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny base model."""
    return tiny.make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def watched(base: str, tmp_path: Path) -> Any:
    """Returns a trainer with a guard, by its settings and others of `training`."""

    def build(guard: dict[str, Any], **training: Any) -> Any:
        recipe = tiny.recipe(base, training={"guard": guard, "optimizer": "adamw_torch", **training})
        trainer = tiny.trainer(recipe, tiny.tokens(recipe, ROWS), tmp_path)
        trainer.guard = recipe.training.guard
        return trainer

    return build


class Spoiling(TrainerCallback):
    """Spoils a weight before a step, so that its loss is no number."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, trainer_state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if trainer_state.global_step + 1 == self.step:
            next(model.parameters()).data.fill_(math.nan)


class Noting(TrainerCallback):
    """Notes the digests of the state after each step, and the schedule's learning rate."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.digests: list[dict[str, str]] = []
        self.rates: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        moments = tree_digest(self.trainer.optimizer.state_dict()["state"])  # without the rate, which is the schedule's
        self.digests.append({**state.digests_of(self.trainer), "moments": moments})
        self.rates.append(self.trainer.lr_scheduler.get_last_lr()[0])


@pytest.mark.parametrize(
    ("value", "before", "beyond"),
    [
        (6.1, STEADY, True),
        (6.0, STEADY, False),
        (100.0, STEADY[1:], False),
        (6.1, [7.0, *STEADY], False),
        (7.1, [7.0, *STEADY], True),
        (1.0, [0.0] * 20, False),
        (5.0, [-2.0] * 20, False),
    ],
    ids=["beyond", "at the bound", "too few", "where it was", "above where it was", "median of 0", "below 0"],
)
def test_beyond_is_above_the_multiple_and_above_all_before(value: float, before: list[float], beyond: bool) -> None:
    assert is_beyond(value, before, 3.0, window=100) == beyond


def test_a_window_of_few_is_judged_by_as_many() -> None:
    assert is_beyond(6.1, [2.0] * 4, 3.0, window=4)
    assert not is_beyond(6.1, [2.0] * 3, 3.0, window=4)


def test_the_error_comes_through_a_pipe_whole() -> None:
    error = SkipError("step 3 has ...", remedy="x", step=3, reason="loss", loss=9.0, grad_norm=1.5, median=2.0)
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_a_skipped_step_leaves_all_but_position_schedule_and_cadence_as_it_was(watched: Any) -> None:
    trainer = watched({"skip": [1, 3]}, max_steps=4, micro_batch_size=4, lr_scheduler="cosine")
    noting = Noting(trainer)
    trainer.add_callback(noting)
    begun = tree_digest(state.trained_weights(trainer.model))
    trainer.train()
    one, two, three, four = noting.digests
    assert one["weights"] == begun != two["weights"]
    still = ("weights", "moments", "rng", "callbacks", "method")
    assert {part: three[part] for part in still} == {part: two[part] for part in still}
    assert all(three[part] != two[part] for part in ("position", "scheduler"))
    assert four["weights"] != three["weights"]
    assert noting.rates == sorted(set(noting.rates), reverse=True)
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 4]
    assert trainer.skipped == (1, 3)
    assert len(trainer.method_state()["guard"]) == 2


def test_the_average_that_is_logged_is_of_the_steps_kept(watched: Any) -> None:
    skip = [3, 5, 6]
    each = watched({"skip": skip}, max_steps=8)
    each.train()
    pairs = watched({"skip": skip}, max_steps=8, log_every=2)
    pairs.train()
    logged = {entry["step"]: entry["loss"] for entry in each.state.log_history if "loss" in entry}
    averages = {entry["step"]: entry["loss"] for entry in pairs.state.log_history if "loss" in entry}

    def mean(*steps: int) -> float:
        return float(sum((np.float32(logged[step]) for step in steps), np.float32(0))) / len(steps)

    assert averages == {2: mean(1, 2), 4: mean(4), 8: mean(7, 8)}
    assert tree_digest(state.trained_weights(each.model)) == tree_digest(state.trained_weights(pairs.model))


def test_a_step_that_is_not_finite_is_found_and_not_taken_over(watched: Any) -> None:
    trainer = watched({}, max_steps=4)
    noting = Noting(trainer)
    trainer.add_callback(noting)
    trainer.add_callback(Spoiling(3))
    with pytest.raises(SkipError, match="step 3 has the loss nan") as caught:
        trainer.train()
    assert (caught.value.step, caught.value.reason) == (3, "nan")
    assert len(noting.digests) == 2


@pytest.mark.parametrize("guard", [{"nan": False}, None])
def test_what_is_not_watched_is_not_found(guard: dict[str, Any] | None, watched: Any) -> None:
    trainer = watched(guard or {}, max_steps=4)
    if guard is None:  # as a trial has it, of which nothing is kept
        trainer.guard = None
    trainer.add_callback(Spoiling(3))
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(trainer.method_state().get("guard", ())) == (2 if guard else 0)


@pytest.mark.parametrize("skip", [[], [2]])
def test_what_the_scaler_refuses_is_neither_found_nor_kept(skip: list[int], watched: Any) -> None:
    """On a CPU, by torch's own scaler; its first two scales are beyond what gradients hold."""
    trainer = watched({"skip": skip}, max_steps=6)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-20)
    trainer.accelerator.native_amp = True
    trainer.accelerator.state._mixed_precision = "fp16"  # by which Accelerate knows that gradients are scaled
    noting = Noting(trainer)
    trainer.add_callback(noting)
    try:
        trainer.train()
    finally:
        trainer.accelerator.state._mixed_precision = "no"
    weights = [one["weights"] for one in noting.digests]
    refused = [step for step in (2, 3, 4, 5, 6) if weights[step - 1] == weights[step - 2]]
    assert 2 in refused
    assert len(refused) < 5
    assert len(trainer.method_state()["guard"]) == 5 - len(refused), "the first one was refused, too"
    moved = noting.rates[1] != noting.rates[0]
    assert moved == bool(skip), "a skipped step is one of the schedule, one that was refused is not"


def test_a_step_that_was_trained_cannot_be_skipped_later(watched: Any) -> None:
    trainer = watched({"skip": [2, 5]}, max_steps=8)
    trainer.state.global_step = 4
    with pytest.raises(UserError, match=r"training.guard.skip has step 2, which this run has trained.* step 4"):
        trainer.load_skipped(())
    trainer.load_skipped((1, 2))
    assert trainer.skipped == (1, 2)


def test_what_is_watched_is_part_of_the_identity_and_what_is_skipped_is_not(base: str) -> None:
    def given(guard: dict[str, Any] | None) -> Any:
        return tiny.recipe(base, training={"guard": guard})

    plain = given({})
    assert "guard" not in identity(given(None))["training"]  # type: ignore[call-overload, index, operator]
    assert identity(given({"skip": [3], "max_skips": 9})) == identity(plain)
    assert identity(given({"loss": 5})) != identity(plain)
    assert fork.require_warm(given(None), given({"window": 20}))
    (line,) = fork.in_words(fork.require_warm(plain, given({"loss": 5})), step=4, end=9, warm=True)
    assert "from step 5" in line
