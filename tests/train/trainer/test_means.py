"""Rows and tokens count alike, in the loss of a step and in all figures of an evaluation, however they are batched.

Plain gradient descent in float32, whose relative error is 6e-8 an operation; `RTOL` leaves room for sums over a row's
tokens and for four steps that follow from each other. Means over batches differed by 1e-4 to 2e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.recipe.methods import SPECS
from tests.support import tiny
from tests.train.trainer.test_micro_batches import rows_of

RTOL = 1e-5
LEARNED: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name, spec in SPECS.items() if not spec.generates},
    "reward": {"method": "reward", "reward": {"center_coefficient": 0.1}},
    "dpo-with-likelihood": {"method": "dpo", "dpo": {"loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}},
    "kto": {"method": "kto", "kto": {"loss": "apo_zero_unpaired", "desirable_weight": 2.0}},
    "simpo": {"method": "cpo", "cpo": {"loss": "simpo", "likelihood": 0.0}},
}
"""Methods that learn from rows. KTO's other loss has an estimate of each micro-batch in it, as TRL has it."""
JUDGED = {"rewards": ["tests.train.trainer.judged:noted"], "num_generations": 2, "beta": 0.5}
WRITING = {"max_completion_length": 5, "top_k": 1}
"""The most likely token alone, so that nothing is drawn."""
WRITTEN: dict[str, dict[str, Any]] = {
    **{
        f"grpo-{loss}": {"method": "grpo", "grpo": {**JUDGED, **WRITING, "loss": loss}}
        for loss in ("grpo", "dapo", "bnpo")
    },
    "rloo": {"method": "rloo", "rloo": {**JUDGED, **WRITING}},
    "distillation": {"method": "distillation", "distillation": {**WRITING, "teacher": "-teacher"}},
}
"""Methods whose model writes. Their steps are always full, of micro-batches of as many completions each."""
OTHERS = ("_runtime", "_per_second", "_time", "std")
"""How figures end that are of the clock, or spreads within a batch."""
PADDED = dict.fromkeys(("orpo", "cpo", "simpo"), "eval_logits/")
"""How figures begin that are means over padding, too."""


@pytest.fixture(scope="module")
def build(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Returns what builds a trainer on some rows, which evaluates on thirteen."""

    def built(settings: dict[str, Any], rows: int = 7, **training: Any) -> Any:
        method = settings["method"]
        if method == "distillation":
            own = settings[method]
            settings = {**settings, method: {**own, "teacher": tiny_base}}
        recipe = tiny.recipe(
            tiny_base,
            training={**settings, "batch_size": 4, "max_steps": 4, **training},
            evaluation={"every": 2},
        )
        given = rows_of({"pretrain": "sft"}.get(method, method))
        if method == "pretrain":
            given = [{"text": f"{row['prompt']} {row['completion']}"} for row in given]
        tokens = tiny.tokens(recipe, given)
        held_out = tokens.select(range(len(tokens) - 13, len(tokens)))
        return tiny.trainer(recipe, tokens.select(range(rows)), tmp_path_factory.mktemp("means"), held_out)

    return built


def figures(trainer: Any) -> dict[str, list[float]]:
    """Trains, and returns loss and gradient norm of each step and the loss of each evaluation."""
    trainer.train()
    return {
        name: [entry[name] for entry in trainer.state.log_history if name in entry]
        for name in ("loss", "grad_norm", "eval_loss")
    }


@pytest.mark.parametrize(
    "rows", [pytest.param(8, id="full", marks=pytest.mark.slow), pytest.param(7, id="partly-filled")]
)
@pytest.mark.parametrize("name", LEARNED)
def test_micro_batches_change_neither_steps_nor_scores(name: str, rows: int, build: Callable[..., Any]) -> None:
    whole, *parts = (figures(build(LEARNED[name], rows, micro_batch_size=micro)) for micro in (4, 2, 1))
    assert [len(values) for values in whole.values()] == [4, 4, 2]
    for part in parts:
        for figure, values in whole.items():
            assert part[figure] == pytest.approx(values, rel=RTOL), figure


def moved(trainer: Any) -> Any:
    """Moves the weights from where they began, so that nothing is zero, the same in each trainer."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=drawn)
    return trainer


@pytest.mark.parametrize("name", [*LEARNED, "kto-with-divergence", *WRITTEN])
def test_an_evaluation_comes_to_the_same_in_batches_of_any_size(name: str, build: Callable[..., Any]) -> None:
    settings = {**LEARNED, **WRITTEN, "kto-with-divergence": {"method": "kto"}}[name]
    trainer, each = moved(build(settings)), 2 if name in WRITTEN else 1  # whole groups of completions
    found = []
    for size in (13, 1, 4):
        trainer.args.per_device_eval_batch_size = -(-size // each) * each
        found.append(trainer.evaluate())
    whole, *parts = found
    shown = {key for key in whole if not key.endswith(OTHERS) and not key.startswith(PADDED.get(name, "-"))}
    assert {"eval_loss", "eval_entropy"} & shown
    assert sum(whole[key] != 0 for key in shown) > 1
    for part in parts:
        assert {key: part[key] for key in shown} == pytest.approx({key: whole[key] for key in shown}, rel=RTOL)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_trials_of_other_batch_sizes_that_learn_nothing_have_one_score(method: str, build: Callable[..., Any]) -> None:
    """A sweep over `training.batch_size`, whose trials evaluate in batches of that size."""
    settings = {"learning_rate": 1e-12, "max_steps": 2}
    first, *others = (
        moved(build(LEARNED[method], batch_size=size, **settings)).evaluate()["eval_loss"] for size in (8, 16, 32)
    )
    assert others == pytest.approx([first] * 2, rel=RTOL)
