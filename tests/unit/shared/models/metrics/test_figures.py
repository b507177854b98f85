"""Figures over rows, and how far they may be trusted: against numbers by hand and SciPy's bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.components.shared.models.metrics import figures
from baton.components.shared.models.metrics.figures import Figure


def test_a_mean_leaves_out_rows_without_a_value() -> None:
    found = figures.mean([1.0, None, 0.0, 0.0])
    assert found.value == pytest.approx(1 / 3)
    assert found.each == [1.0, None, 0.0, 0.0]


def test_a_ratio_is_that_of_the_sums() -> None:
    """A loss per token is no mean of the rows' losses: 6 nats over 10 tokens."""
    assert figures.ratio([1.0, 5.0], [1, 9]).value == pytest.approx(0.6)


NOT_MEASURED = {
    "no row": (figures.mean([]), "no row counted"),
    "no row counts": (figures.mean([None, None]), "no row counted"),
    "no token counts": (figures.ratio([0.0, 0.0], [0, 0]), "no row counted"),
    "not a number": (figures.mean([1.0, math.nan]), "not finite"),
    "infinite": (figures.mean([1.0, math.inf]), "not finite"),
    "both ends": (figures.mean([-math.inf, math.inf]), "not finite"),
    "a constant": (figures.constant(math.inf), "not finite"),
}


@pytest.mark.parametrize(("figure", "why"), NOT_MEASURED.values(), ids=NOT_MEASURED)
def test_a_figure_that_was_not_measured_has_no_number_and_no_interval(figure: figures.Figure, why: str) -> None:
    found = {"it": figure, "other": figures.mean([2.0, 4.0])}
    assert figures.values(found) == {"it": None, "other": 3.0}
    assert (figure.not_measured, found["other"].not_measured) == (why, None)
    assert list(figures.intervals({"after": found}, 0.95, 0)["after"]) == ["other"]


def test_intervals_of_a_mean_are_those_of_scipy() -> None:
    scipy = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(3)
    rows = random.normal(5, 2, 200)
    theirs = scipy.bootstrap((rows,), np.mean, n_resamples=1000, method="percentile", rng=random).confidence_interval
    found = figures.intervals({"after": {"x": figures.mean(rows.tolist())}}, 0.95, seed=0)["after"]["x"]
    assert found == pytest.approx([theirs.low, theirs.high], abs=0.06)  # the ends' own spread is 0.02 each


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 300 samples at a level of 0.7, within four of the binomial's standard deviations of 210."""
    random = np.random.default_rng(11)
    hits = 0
    for seed in range(300):
        drawn = figures.mean(random.normal(3, 1, 80).tolist())
        low, high = figures.intervals({"after": {"x": drawn}}, 0.7, seed)["after"]["x"]
        hits += low <= 3 <= high
    assert 178 <= hits <= 242


def test_a_gain_is_of_the_same_rows() -> None:
    """Every row gains exactly 1, however different the rows are: the gain is certain where the figures are not."""
    before = [float(row % 17) for row in range(50)]
    models = {
        "before": {"x": figures.mean(before)},
        "after": {"x": figures.mean([value + 1 for value in before])},
        "production": {"x": figures.mean(before[:49])},
    }
    found = figures.intervals(models, 0.95, seed=5)
    assert found["gain"]["x"] == pytest.approx([1.0, 1.0])
    assert found["after"]["x"][1] - found["after"]["x"][0] > 1
    assert found["gain_on_production"] == {}, "other rows: nothing to pair"


def test_intervals_of_a_perplexity_are_the_exponentials_of_those_of_the_loss() -> None:
    loss = figures.ratio([3.0, 8.0, 1.0, 9.0, 4.0], [2, 5, 1, 3, 4])
    perplexity = Figure(loss.statistics, lambda sums: np.exp(figures.quotient(sums)), loss.each)
    found = figures.intervals({"after": {"loss": loss, "perplexity": perplexity}}, 0.8, seed=1)["after"]
    # Quantiles lie between two draws, linearly: their exponentials agree to that.
    assert found["perplexity"] == pytest.approx([math.exp(end) for end in found["loss"]], rel=1e-2)
    assert found["loss"][0] < loss.value < found["loss"][1]


def test_intervals_are_a_function_of_rows_and_seed() -> None:
    given = {"after": {"x": figures.mean([math.sqrt(row) for row in range(40)])}}
    assert figures.intervals(given, 0.95, seed=2) == figures.intervals(given, 0.95, seed=2)
    assert figures.intervals(given, 0.95, seed=2) != figures.intervals(given, 0.95, seed=3)


def test_drawing_in_blocks_makes_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw takes as many rows as there are, however few draws fit into memory at once."""
    monkeypatch.setattr(figures, "BLOCK", 70)
    sums = figures._resampled(np.ones((10, 1)), seed=0)
    assert sums.shape == (1000, 1)
    assert (sums == 10).all()


def test_a_figure_that_some_draw_leaves_undefined_has_no_interval() -> None:
    found = figures.intervals({"after": {"x": figures.mean([1.0, None, None])}}, 0.95, seed=0)
    assert found["after"] == {}
