"""Figures as sums over rows, so that rows can be drawn again: the bootstrap (Efron 1979)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]

RESAMPLES = 1000
"""Times the rows are drawn again for an interval."""

BLOCK = 2**24
"""Drawn row numbers in memory at once."""

Interval = list[float]
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Figure:
    """A number over rows.

    Attributes:
        statistics: What each row adds, of shape (rows, k); zeros where a row does not count.
        compute: From sums of shape (draws, k) to figures of shape (draws,), nan where no row counted.
        each: The figure of each row by itself, None where it does not count or has none.
        better: `higher` or `lower`, whichever the better model has; None where that is not known.
    """

    statistics: Array
    compute: Callable[[Array], Array]
    each: list[float | None]
    better: Better | None = "higher"

    @property
    def value(self) -> float:
        """The figure over all rows, nan where none counted."""
        return float(self.compute(self.statistics.sum(0, keepdims=True))[0])

    @property
    def not_measured(self) -> str | None:
        """The reason why it has no number, None where it has one."""
        if math.isfinite(self.value):
            return None
        return "no row counted" if np.isfinite(self.statistics).all() and math.isnan(self.value) else "not finite"


def mean(values: Sequence[float | None], *, better: Better | None = "higher") -> Figure:
    """Returns the mean of the rows' values; a row without one does not count."""
    numbers = [0.0 if value is None else value for value in values]
    return ratio(numbers, [value is not None for value in values], list(values), better=better)


def ratio(
    above: Sequence[float],
    below: Sequence[float],
    each: list[float | None] | None = None,
    *,
    better: Better | None = "higher",
) -> Figure:
    """Returns a sum over rows, divided by another: a loss per token, for example."""
    statistics = np.array([above, below], dtype=np.float64).T.reshape(-1, 2)
    return Figure(statistics, quotient, each if each is not None else [None] * len(statistics), better)


def constant(value: float, *, better: Better | None = "higher") -> Figure:
    """Returns a number that is no sum over rows, and has no interval."""
    return Figure(np.zeros((0, 0)), lambda sums: np.full(len(sums), value), [], better)


def quotient(sums: Array) -> Array:
    """Returns the first of each pair of sums over the second, nan where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[:, 1] != 0, sums[:, 0] / sums[:, 1], np.nan)


def values(figures: Mapping[str, Figure]) -> dict[str, float | None]:
    """Returns the figures as numbers, None for one that was not measured; see `Figure.not_measured`."""
    return {name: None if figure.not_measured else figure.value for name, figure in figures.items()}


def intervals(models: Mapping[str, Mapping[str, Figure]], level: float, seed: int) -> dict[str, dict[str, Interval]]:
    """Returns percentile intervals of each model's figures, and of what training gained.

    Rows are drawn alike for all models, so that a difference is that of the same rows (a paired bootstrap; Koehn 2004).
    An interval knows the rows alone: a share of 0 of 40 has one without width, and few rows make too narrow ones.

    Args:
        models: `before`, `after` and, where there is one, `production`, each with its figures.
        level: Share of the draws inside an interval.
        seed: Of the draws.

    Returns:
        `before`, `after`, `production`, `gain` (after − before) and `gain_on_production` (after − production), each a
        mapping of the figure's name to the interval's ends; none for a figure that some draw leaves undefined.
    """
    drawn = {when: _drawn(figures, seed) for when, figures in models.items()}
    for name, against in (("gain", "before"), ("gain_on_production", "production")):
        theirs = drawn.get(against, {})
        shared = [x for x in drawn["after"] if x in theirs and _paired(models["after"][x], models[against][x])]
        drawn[name] = {x: drawn["after"][x] - theirs[x] for x in shared}
    return {
        when: {name: ends for name, draws in by_name.items() if (ends := _ends(draws, level))}
        for when, by_name in drawn.items()
    }


def _paired(one: Figure, other: Figure) -> bool:
    return len(one.statistics) == len(other.statistics)


def _ends(draws: Array, level: float) -> Interval | None:
    if not np.isfinite(draws).all():
        return None
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return [float(low), float(high)]


def _drawn(figures: Mapping[str, Figure], seed: int) -> dict[str, Array]:
    """Returns each figure over rows drawn with replacement, of shape (`RESAMPLES`,)."""
    draws: dict[str, Array] = {}
    for rows in {len(figure.statistics) for figure in figures.values()} - {0}:
        same = {name: figure for name, figure in figures.items() if len(figure.statistics) == rows}
        sums = _resampled(np.hstack([figure.statistics for figure in same.values()]), seed)
        ends = np.cumsum([figure.statistics.shape[1] for figure in same.values()])[:-1]
        for (name, figure), own in zip(same.items(), np.split(sums, ends, axis=1), strict=True):
            draws[name] = figure.compute(own)
    return {name: draws[name] for name in figures if name in draws}


def _resampled(statistics: Array, seed: int) -> Array:
    """Returns the sums over rows drawn with replacement, of shape (`RESAMPLES`, k): a function of rows and seed."""
    rows = len(statistics)
    random = np.random.default_rng([seed, rows])
    block = max(1, min(RESAMPLES, BLOCK // rows))
    sums = []
    for first in range(0, RESAMPLES, block):
        count = min(block, RESAMPLES - first)
        taken = random.integers(rows, size=(count, rows)) + np.arange(count)[:, None] * rows
        times = np.bincount(taken.ravel(), minlength=count * rows).reshape(count, rows)
        sums.append(times @ statistics)
    return np.concatenate(sums)
