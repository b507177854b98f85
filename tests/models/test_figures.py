"""Figures over rows, and how far they may be trusted: against numbers by hand and SciPy's bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.models import bootstrap, metrics
from baton.models.metrics import Figure


def test_a_mean_leaves_out_rows_without_a_value() -> None:
    found = metrics.mean_figure([1.0, None, 0.0, 0.0])
    assert found.value == pytest.approx(1 / 3)
    assert found.each == [1.0, None, 0.0, 0.0]


def test_a_ratio_is_that_of_the_sums() -> None:
    """A loss per token is no mean of the rows' losses: 6 nats over 10 tokens."""
    assert metrics.ratio_figure([1.0, 5.0], [1, 9]).value == pytest.approx(0.6)


NOT_MEASURED = {
    "no row": (metrics.mean_figure([]), "no row counted"),
    "no row counts": (metrics.mean_figure([None, None]), "no row counted"),
    "no token counts": (metrics.ratio_figure([0.0, 0.0], [0, 0]), "no row counted"),
    "not a number": (metrics.mean_figure([1.0, math.nan]), "not finite"),
    "infinite": (metrics.mean_figure([1.0, math.inf]), "not finite"),
    "both ends": (metrics.mean_figure([-math.inf, math.inf]), "not finite"),
    "a constant": (metrics.constant_figure(math.inf), "not finite"),
}


@pytest.mark.parametrize(("figure", "why"), NOT_MEASURED.values(), ids=NOT_MEASURED)
def test_a_figure_that_was_not_measured_has_no_number_and_no_interval(figure: metrics.Figure, why: str) -> None:
    found = {"it": figure, "other": metrics.mean_figure([2.0, 4.0])}
    assert metrics.figure_values(found) == {"it": None, "other": 3.0}
    assert (figure.not_measured, found["other"].not_measured) == (why, None)
    assert list(metrics.intervals({"after": found}, 0.95, 0)["after"]) == ["other"]


def test_intervals_of_a_mean_are_those_of_scipy() -> None:
    scipy = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(3)
    rows = random.normal(5, 2, 200)
    theirs = scipy.bootstrap((rows,), np.mean, n_resamples=1000, method="percentile", rng=random).confidence_interval
    found = metrics.intervals({"after": {"x": metrics.mean_figure(rows.tolist())}}, 0.95, seed=0)["after"]["x"]
    assert found == pytest.approx([theirs.low, theirs.high], abs=0.06)  # the ends' own spread is 0.02 each


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 300 samples at a level of 0.7, within four of the binomial's standard deviations of 210."""
    random = np.random.default_rng(11)
    hits = 0
    for seed in range(300):
        drawn = metrics.mean_figure(random.normal(3, 1, 80).tolist())
        low, high = metrics.intervals({"after": {"x": drawn}}, 0.7, seed)["after"]["x"]
        hits += low <= 3 <= high
    assert 178 <= hits <= 242


def test_a_gain_is_of_the_same_rows() -> None:
    """Every row gains exactly 1, however different the rows are: the gain is certain where the figures are not."""
    before = [float(row % 17) for row in range(50)]
    models = {
        "before": {"x": metrics.mean_figure(before)},
        "after": {"x": metrics.mean_figure([value + 1 for value in before])},
        "production": {"x": metrics.mean_figure(before[:49])},
    }
    found = metrics.intervals(models, 0.95, seed=5)
    assert found["gain"]["x"] == pytest.approx([1.0, 1.0])
    assert found["after"]["x"][1] - found["after"]["x"][0] > 1
    assert found["gain_on_production"] == {}, "other rows: nothing to pair"


def test_intervals_of_a_perplexity_are_the_exponentials_of_those_of_the_loss() -> None:
    loss = metrics.ratio_figure([3.0, 8.0, 1.0, 9.0, 4.0], [2, 5, 1, 3, 4])
    perplexity = Figure(loss.statistics, lambda sums: np.exp(metrics.quotient(sums)), loss.each)
    found = metrics.intervals({"after": {"loss": loss, "perplexity": perplexity}}, 0.8, seed=1)["after"]
    # Quantiles lie between two draws, linearly: their exponentials agree to that.
    assert found["perplexity"] == pytest.approx([math.exp(end) for end in found["loss"]], rel=1e-2)
    assert found["loss"][0] < loss.value < found["loss"][1]


def test_intervals_are_a_function_of_rows_and_seed() -> None:
    given = {"after": {"x": metrics.mean_figure([math.sqrt(row) for row in range(40)])}}
    assert metrics.intervals(given, 0.95, seed=2) == metrics.intervals(given, 0.95, seed=2)
    assert metrics.intervals(given, 0.95, seed=2) != metrics.intervals(given, 0.95, seed=3)


def test_drawing_in_blocks_makes_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw takes as many rows as there are, however few draws fit into memory at once."""
    monkeypatch.setattr(bootstrap, "RESAMPLE_BLOCK", 70)
    sums = bootstrap.resampled(np.ones((10, 1)), seed=0)
    assert sums.shape == (1000, 1)
    assert (sums == 10).all()


def test_a_figure_that_some_draw_leaves_undefined_has_no_interval() -> None:
    found = metrics.intervals({"after": {"x": metrics.mean_figure([1.0, None, None])}}, 0.95, seed=0)
    assert found["after"] == {}
