"""How a batch is cut into micro-batches is a matter of memory: what is learned depends on it as far as said here.

Plain gradient descent and float32, so that differences in rounding stay as small as they are: at most a few units in
the last of about seven places. `RTOL` leaves room for their sum over a row's tokens, and weights are compared by the
size of their matrix, since single values may be near zero.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from baton.recipe.recipe import Recipe
from tests.support import tiny

RTOL = 1e-6
"""Measured: losses differ by at most 1.2e-7 of their value, weights by 1.0e-7 of the largest in their matrix."""


def rows_of(method: str) -> list[dict[str, Any]]:
    """Returns rows of all lengths."""
    if method == "sft":
        return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in tiny.PAIRS]
    if method == "kto":
        return [
            {"prompt": pair["prompt"], "completion": pair["chosen"], "label": number % 3 > 0}
            for number, pair in enumerate(tiny.PAIRS)
        ]
    return tiny.PAIRS


SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"method": "sft"},
    "dpo": {"method": "dpo"},
    "reward": {"method": "reward", "reward": {"center_coefficient": 0.1}},
    "kto": {"method": "kto", "kto": {"loss": "apo_zero_unpaired", "desirable_weight": 2.0}},
    "cpo": {"method": "cpo", "cpo": {"loss": "simpo", "likelihood": 0.0}},
}


class Trained:
    """What a run of some steps came to."""

    def __init__(self, recipe: Recipe, rows: datasets.Dataset, folder: Path, *, weighs: bool = True) -> None:
        trainer = tiny.trainer(recipe, rows, folder)
        trainer.weighs = weighs
        self.before = tiny.weights(trainer)
        trainer.train()
        self.losses = tiny.losses(trainer)
        self.weights = tiny.weights(trainer)

    def distance(self, other: Trained) -> float:
        """Largest difference of a weight, as a share of the largest in its matrix."""
        return max(
            float((value - other.weights[name]).abs().max() / value.abs().max())
            for name, value in self.weights.items()
            if value.abs().max() > 0
        )


@pytest.fixture(scope="module")
def train(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Trains each setting once."""
    known: dict[str, Trained] = {}

    def trained(name: str, micro: int, rows: datasets.Dataset | None = None, **training: Any) -> Trained:
        key = f"{name} {micro} {len(rows) if rows else 0} {training}"
        if key not in known:
            recipe = tiny.recipe(tiny_base, training={**SETTINGS[name], "micro_batch_size": micro, **training})
            given = tiny.tokens(recipe, rows_of(name)) if rows is None else rows
            known[key] = Trained(recipe, given, tmp_path_factory.mktemp("micro"))
        return known[key]

    return trained


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_micro_batches_change_rounding_alone(name: str, micro: int, train: Callable[..., Trained]) -> None:
    whole, parts = train(name, 8), train(name, micro)
    assert len(whole.losses) == 3
    assert parts.losses == pytest.approx(whole.losses, rel=RTOL)
    assert parts.distance(whole) < RTOL
    moved = [name for name in whole.weights if not torch.equal(whole.weights[name], whole.before[name])]
    assert len(moved) > len(whole.weights) / 2, "something was learned"


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_last_batch_of_whole_micro_batches_is_a_batch_of_its_own(
    name: str, micro: int, train: Callable[..., Trained], tiny_base: str
) -> None:
    """Twelve rows, of which eight and four make a step."""
    recipe = tiny.recipe(tiny_base, training=SETTINGS[name])
    rows = tiny.tokens(recipe, rows_of(name)).select(range(12))
    whole, parts = train(name, 8, rows, max_steps=4), train(name, micro, rows, max_steps=4)
    assert parts.losses == pytest.approx(whole.losses, rel=RTOL)
    assert parts.distance(whole) < RTOL


def batches(recipe: Recipe, rows: datasets.Dataset, folder: Path) -> list[Any]:
    """Returns the micro-batches of the first epoch, as a trainer of the same recipe would draw them."""
    return list(tiny.trainer(recipe, rows, folder).get_train_dataloader())


def token_losses(model: Any, batch: Any) -> torch.Tensor:
    """Returns the negative log-likelihood of each labelled token, row by row, without padding."""
    found = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        length = int(mask.sum())
        logits = model(input_ids=ids[None, :length]).logits[0, :-1]
        wanted = labels[1:length]
        chosen = logits.log_softmax(-1).gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        found.append(-chosen[wanted != -100])
    return torch.cat(found)


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_each_token_of_a_batch_weighs_the_same_in_sft_and_so_in_a_short_last_one(
    micro: int, tiny_base: str, tmp_path: Path
) -> None:
    """Eleven rows, eight and three to a step: by hand, each step is the mean over its tokens in one full batch."""
    settings = {"micro_batch_size": micro, "max_steps": 2, "lr_scheduler": "constant", "max_grad_norm": 0.0}
    recipe = tiny.recipe(tiny_base, training={"method": "sft", **settings})
    rows = tiny.tokens(recipe, rows_of("sft")).select(range(11))
    trained = Trained(recipe, rows, tmp_path)
    fresh = tiny.trainer(recipe, rows, tmp_path)
    model = fresh.model
    drawn = list(fresh.get_train_dataloader())
    per_step = 8 // micro
    expected = []
    for step in (drawn[:per_step], drawn[per_step:]):
        losses = torch.cat([token_losses(model, batch) for batch in step])
        loss = losses.mean()
        expected.append(loss.item())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for value in model.parameters():
                if value.grad is not None:
                    value -= recipe.training.learning_rate * value.grad
    assert sum(len(batch["input_ids"]) for batch in drawn) == 11
    assert trained.losses == pytest.approx(expected, rel=RTOL)
    for name, value in tiny.weights(fresh).items():
        torch.testing.assert_close(trained.weights[name], value, rtol=RTOL, atol=1e-6, msg=name)


def orpo_by_hand(model: Any, rows: list[dict[str, Any]], beta: float) -> float:
    """ORPO's loss of one micro-batch: the mean negative log-likelihood over all tokens of its prompts and chosen
    answers, less β times the mean over its rows of log σ(log odds), of likelihoods per token."""
    lengths, likelihoods = [], []
    terms = []
    for row in rows:
        per_token = {}
        for side in ("chosen_ids", "rejected_ids"):
            ids = row["prompt_ids"] + row[side]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
            found = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            per_token[side] = found[len(row["prompt_ids"]) - 1 :].mean()
            if side == "chosen_ids":
                lengths.append(len(found))
                likelihoods.append(found.sum())
        odds = {side: value - torch.log1p(-value.exp()) for side, value in per_token.items()}
        terms.append(torch.nn.functional.logsigmoid(odds["chosen_ids"] - odds["rejected_ids"]))
    return float(-sum(likelihoods) / sum(lengths) - beta * torch.stack(terms).mean())


@pytest.mark.parametrize("weighs", [True, False], ids=["now", "before"])
def test_orpo_weighs_each_token_of_a_step_the_same_and_in_runs_of_before_each_micro_batch(
    weighs: bool, tiny_base: str, tmp_path: Path
) -> None:
    first = {}
    for micro in (1, 2, 4, 8):
        recipe = tiny.recipe(tiny_base, training={"method": "orpo", "micro_batch_size": micro, "max_steps": 1})
        rows = tiny.tokens(recipe, tiny.PAIRS)
        by_ids = {repr(row["prompt_ids"] + row["chosen_ids"]): row for row in rows}
        fresh = tiny.trainer(recipe, rows, tmp_path)
        model = fresh.model.eval()
        members = []
        for batch in list(fresh.get_train_dataloader())[: 8 // micro]:
            ids, masks = batch["chosen_input_ids"], batch["chosen_attention_mask"]
            members.append([by_ids[repr(x[mask.bool()].tolist())] for x, mask in zip(ids, masks, strict=True)])
        counted = [[row for batch in members for row in batch]] if weighs else members
        wanted = [orpo_by_hand(model, batch, beta=0.1) for batch in counted]
        (first[micro],) = Trained(recipe, rows, tmp_path, weighs=weighs).losses
        assert first[micro] == pytest.approx(sum(wanted) / len(wanted), rel=RTOL)
    assert (max(first.values()) - min(first.values()) > 100 * RTOL * first[8]) == (not weighs)


@pytest.mark.parametrize("weighs", [True, False], ids=["now", "before"])
def test_each_row_of_a_last_step_weighs_the_same_and_in_runs_of_before_each_micro_batch(
    weighs: bool, tiny_base: str, tmp_path: Path
) -> None:
    """Five rows in micro-batches of four and one: the one had half the weight, as `Trainer` has it."""
    settings = {**SETTINGS["reward"], "micro_batch_size": 4, "max_steps": 2, "learning_rate": 1e-9}
    recipe = tiny.recipe(tiny_base, training=settings)
    rows = tiny.tokens(recipe, rows_of("reward")).select(range(13))
    trainer = tiny.trainer(recipe, rows, tmp_path)
    drawn = list(trainer.get_train_dataloader())
    sizes = [len(batch["input_ids"]) // 2 for batch in drawn]
    with torch.no_grad():
        means = [float(trainer.compute_loss(trainer.model, dict(batch))) for batch in drawn]
    assert sizes == [4, 4, 4, 1]
    last = (4 * means[2] + means[3]) / 5 if weighs else (means[2] + means[3]) / 2
    made = Trained(recipe, rows, tmp_path, weighs=weighs)
    assert made.losses == pytest.approx([(means[0] + means[1]) / 2, last], rel=RTOL)
