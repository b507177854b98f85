"""The plots of a sweep's page: learning curves over each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from baton.components.shared.pages import svg
from baton.components.shared.sweeps.view import Trial, View

BEST, GOOD, MIDDLE, WORST = svg.ORANGE, svg.BLUE, svg.SKY, svg.GREY
BANDS = ((BEST, "best"), (GOOD, "first quarter"), (MIDDLE, "to the middle"), (WORST, "the others"))
"""Colours by rank, and what they stand for."""
NAMED = 6
"""Curves of survivors that the legend names."""


def draw(view: View) -> dict[str, Markup]:
    """Returns all plots by name; one that has nothing to show is missing."""
    plots = {
        "score": (f"{view.metric} of each trial by step", score_plot),
        "loss": ("Training loss of each trial by step", loss_plot),
    }
    return svg.draw_all(plots, view)


def score_plot(view: View) -> Figure | None:
    """Plots the score after each chunk."""
    return _curves(view, view.metric, lambda trial: _points(trial.scores), marks=True)


def loss_plot(view: View) -> Figure | None:
    """Plots the training loss."""
    return _curves(view, "training loss", lambda trial: svg.series(trial.losses, "loss"), marks=False)


def color(trial: Trial, scored: int) -> str:
    """Returns the colour of a trial among so many that have a score."""
    if trial.rank is None:
        return WORST
    if trial.rank == 1:
        return BEST
    share = (trial.rank - 1) / max(scored, 1)
    return GOOD if share < 0.25 else MIDDLE if share < 0.5 else WORST


def _curves(view: View, name: str, points: Callable[[Trial], svg.Points], *, marks: bool) -> Figure | None:
    curves = {trial.id: points(trial) for trial in view.trials}
    shown = [trial for trial in view.trials if len(curves[trial.id][0])]
    if not shown:
        return None
    scored = sum(trial.rank is not None for trial in view.trials)
    figure, (ax,) = svg.blank_figure(360)
    limit = max(24, svg.NUM_POINTS // len(shown))
    for trial in reversed(shown):  # the best on top
        xs, ys = curves[trial.id]
        if not marks:
            xs, ys = _smoothed(xs, ys)
        alive = trial.is_alive
        ax.plot(
            *svg.thin((xs, ys), limit),
            "-o" if marks else "-",
            ms=4 if alive else 2.5,
            color=color(trial, scored) if alive else WORST,
            lw=2.2 if trial.rank == 1 else 1.5 if alive else 0.9,
            alpha=1.0 if alive else 0.45,
            zorder=3 if alive else 2,
        )
    values = np.concatenate([ys for _, ys in (curves[trial.id] for trial in shown)])
    if len(values) and values.min() > 0 and values.max() / values.min() > 50:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(svg.compact))
    ax.set_ylabel(name)
    svg.step_axis(ax, ax.get_xlim()[1])
    _legend(figure, view, scored)
    return figure


def _smoothed(xs: np.ndarray, ys: np.ndarray) -> svg.Points:
    """Returns the moving mean of a curve that has many points: of many curves only the course can be seen."""
    window = len(xs) // 20
    if window < 3:
        return xs, ys
    return xs[window // 2 : window // 2 + len(xs) - window + 1], np.convolve(ys, np.ones(window) / window, "valid")


def _legend(figure: Figure, view: View, scored: int) -> None:
    alive = [trial for trial in view.trials if trial.is_alive and trial.rank]
    named: dict[str, list[str]] = {}
    for trial in alive:
        named.setdefault(color(trial, scored), []).append(trial.id)
    handles = [
        Line2D([], [], color=hue, lw=2, label=", ".join(named[hue]) if len(alive) <= NAMED else words)
        for hue, words in BANDS
        if hue in named
    ]
    if len(alive) < len(view.trials):
        handles.append(Line2D([], [], color=WORST, lw=0.9, alpha=0.6, label="stopped or failed"))
    figure.legend(handles=handles, loc="outside upper left", ncols=7)


def _points(pairs: Sequence[tuple[int, float]]) -> svg.Points:
    finite = [(step, value) for step, value in pairs if math.isfinite(value)]
    return np.array([step for step, _ in finite], float), np.array([value for _, value in finite], float)
