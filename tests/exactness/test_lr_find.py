"""The learning-rate finder: what it finds is used, and the run starts from untouched state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from baton.errors import BatonError
from baton.recipe.recipe import Recipe
from baton.recipe.training import LRFind
from baton.runs.documents import LearningRate
from baton.train import lr_find
from tests.support.pages import read

SPEC = LRFind(start=1e-5, end=10.0, steps=40, smoothing=0.5)


@pytest.mark.slow
def test_the_run_is_that_of_the_rate_written_out(recipes: dict[str, Recipe], legs: Any) -> None:
    recipe = legs.changed(recipes["scratch"], chunks__count=2, training__lr_find=SPEC.model_dump(mode="json"))
    run = legs.prepare(recipe, "lr-found")
    code, printed = legs.leg(legs.find_lr, run.uri)
    assert code == 0, printed
    rate = run.require("lr_find.json")["learning_rate"]
    assert SPEC.start < rate < SPEC.end
    legs.train(run)
    told = legs.prepare(legs.changed(recipes["scratch"], chunks__count=2, training__learning_rate=rate), "lr-told")
    legs.train(told)
    assert legs.losses(run) == legs.losses(told)
    assert legs.final(run).meta.state == legs.final(told).meta.state


def test_a_second_search_finds_what_the_first_did(recipes: dict[str, Recipe], legs: Any) -> None:
    stopping: dict[str, Any] = {
        "training__early_stopping": {"patience": 2},
        "evaluation__every": 2,
    }  # has no part in it
    searched = legs.changed(recipes["scratch"], training__lr_find=SPEC.model_dump(mode="json"), **stopping)
    run = legs.prepare(searched, "lr-twice")
    for _ in range(2):
        code, printed = legs.leg(legs.find_lr, run.uri)
        assert code == 0, printed
    assert [record.stage for record in run.records()].count("lr-find") == 1


def test_rates_grow_by_the_same_factor() -> None:
    rates = [lr_find.rate_at(SPEC, step) for step in range(SPEC.steps)]
    assert rates[0] == pytest.approx(1e-5)
    assert rates[-1] == pytest.approx(10.0)
    assert np.allclose(np.diff(np.log(rates)), np.log(1e6) / 39)


def test_the_average_has_no_bias_at_its_start() -> None:
    assert lr_find.smooth([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0, 3.0, 3.0])
    assert lr_find.smooth([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])


def test_steepest_and_tenth_of_a_known_curve() -> None:
    rates = [10.0**power for power in np.linspace(-5, 0, 51)]
    losses = [4 - 3 / (1 + np.exp(-4 * (np.log10(rate) + 3))) + 40 * max(0.0, np.log10(rate) + 1) for rate in rates]
    exact = SPEC.model_copy(update={"smoothing": 0.0})
    assert lr_find.suggest(rates, losses, exact) == pytest.approx(1e-3, rel=0.3)
    assert lr_find.suggest(rates, losses, exact.model_copy(update={"take": "tenth"})) == pytest.approx(1e-2, rel=0.3)


@pytest.mark.parametrize("take", ["steepest", "tenth"])
@pytest.mark.parametrize("end", [math.nan, math.inf, -math.inf])
def test_what_follows_a_loss_that_is_not_finite_does_not_count(take: str, end: float) -> None:
    rates = [10.0**power for power in np.linspace(-5, 0, 51)]
    losses = [4 - 3 / (1 + np.exp(-4 * (np.log10(rate) + 3))) + 40 * max(0.0, np.log10(rate) + 1) for rate in rates]
    spec = SPEC.model_copy(update={"take": take})
    assert lr_find.suggest(rates, [*losses[:45], end, *losses[46:]], spec) == lr_find.suggest(rates, losses, spec)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_never_finite_are_an_error(loss: float) -> None:
    with pytest.raises(BatonError, match="never falls between"):
        lr_find.suggest([1e-5, 1e-4, 1e-3], [loss] * 3, SPEC)


def test_losses_that_never_fall_are_an_error() -> None:
    rates = [1e-5 * 2**step for step in range(20)]
    with pytest.raises(BatonError, match="never falls between"):
        lr_find.suggest(rates, [float(step) for step in range(1, 21)], SPEC)


def test_the_page_shows_the_rate_and_needs_nothing_else() -> None:
    found = LearningRate(learning_rate=0.0012, rates=[1e-5, 1e-3, 1e-1], losses=[3.0, 2.0, 9.0])
    html = lr_find.page("my-run", found, SPEC)
    page = read(html)
    assert "Learning rate: 0.0012" in page.text
    assert page.curves("loss")["loss"] == [(1e-5, 3.0), (1e-3, 2.0)], "the loss that diverges hides no other"
    assert [mark["at"] for mark in page.plot("loss")["marks"]] == [0.0012]
