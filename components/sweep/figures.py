"""The plots of a sweep's page: learning curves over each other, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from baton.components.shared.pages import svg
from baton.components.shared.pages.svg import Canvas
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
        "parallel": ("Each trial's values and its score", parallel_plot),
    }
    return svg.draw_all(plots, view)


def score_plot(view: View, canvas: Canvas) -> Figure | None:
    """Plots the score after each chunk."""
    return _curves(view, canvas, view.metric, lambda trial: _points(trial.scores), marks=True)


def loss_plot(view: View, canvas: Canvas) -> Figure | None:
    """Plots the training loss."""
    return _curves(view, canvas, "training loss", lambda trial: svg.series(trial.losses, "loss"), marks=False)


def color(trial: Trial, scored: int) -> str:
    """Returns the colour of a trial among so many that have a score."""
    if trial.rank is None:
        return WORST
    if trial.rank == 1:
        return BEST
    share = (trial.rank - 1) / max(scored, 1)
    return GOOD if share < 0.25 else MIDDLE if share < 0.5 else WORST


def _curves(
    view: View, canvas: Canvas, name: str, points: Callable[[Trial], svg.Points], *, marks: bool
) -> Figure | None:
    curves = {trial.id: points(trial) for trial in view.trials}
    shown = [trial for trial in view.trials if len(curves[trial.id][0])]
    if not shown:
        return None
    scored = sum(trial.rank is not None for trial in view.trials)
    figure, (ax,) = svg.blank_figure(canvas, 360 if canvas is svg.WIDE else 320)
    limit = max(24, canvas.num_points // len(shown))
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
    svg.step_axis(ax, ax.get_xlim()[1], canvas)
    _legend(figure, view, canvas, scored)
    return figure


def _smoothed(xs: np.ndarray, ys: np.ndarray) -> svg.Points:
    """Returns the moving mean of a curve that has many points: of many curves only the course can be seen."""
    window = len(xs) // 20
    if window < 3:
        return xs, ys
    return xs[window // 2 : window // 2 + len(xs) - window + 1], np.convolve(ys, np.ones(window) / window, "valid")


def _legend(figure: Figure, view: View, canvas: Canvas, scored: int) -> None:
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
    figure.legend(handles=handles, loc="outside upper left", ncols=7 if canvas is svg.WIDE else 3)


def _points(pairs: Sequence[tuple[int, float]]) -> svg.Points:
    finite = [(step, value) for step, value in pairs if math.isfinite(value)]
    return np.array([step for step, _ in finite], float), np.array([value for _, value in finite], float)


@dataclass(frozen=True)
class Scale:
    """One axis of the parallel coordinates.

    Attributes:
        name: What is written at it.
        places: A value for each trial, between 0 and 1, None where it has none.
        ticks: Place and text.
    """

    name: str
    places: list[float | None]
    ticks: list[tuple[float, str]]


def scales(view: View) -> list[Scale]:
    """Returns the axes: each parameter in which trials differ, and the score, the better end up."""
    axes = []
    for path, log in view.parameters.items():
        values = [trial.values.get(path) for trial in view.trials]
        if len({repr(value) for value in values}) > 1:
            axes.append(_scale(_short(path, view), values, log=log))
    scores = [trial.score if trial.rank else None for trial in view.trials]
    score = _scale(view.metric, scores, log=False)
    if view.mode == "min":
        flipped = [None if place is None else 1 - place for place in score.places]
        score = Scale(score.name, flipped, [(1 - place, text) for place, text in score.ticks])
    return [*axes, score]


def _scale(name: str, values: Sequence[Any], *, log: bool) -> Scale:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if values and len(numbers) == sum(value is not None for value in values) and len(numbers):
        return _numeric(name, values, numbers, log=log and min(numbers) > 0)
    words = sorted({_text(value) for value in values})
    at = {word: (index + 0.5) / len(words) for index, word in enumerate(words)}
    return Scale(name, [at[_text(value)] for value in values], [(place, word) for word, place in at.items()])


def _numeric(name: str, values: Sequence[Any], numbers: list[float], *, log: bool) -> Scale:
    shape: Callable[[float], float] = math.log10 if log else float
    low, high = shape(min(numbers)), shape(max(numbers))
    span = high - low or 1.0

    def place(value: float) -> float:
        return (shape(value) - low) / span if high > low else 0.5

    different = sorted(set(numbers))
    if len(different) <= 5:
        marks = different
    elif log:
        marks = [10**power for power in range(math.ceil(low), math.floor(high) + 1)]
        marks = [different[0], *(m for m in marks if 0.1 < place(m) < 0.9), different[-1]]
    else:
        inner = [m for m in MaxNLocator(nbins=4).tick_values(low, high) if 0.1 < place(m) < 0.9]
        marks = [different[0], *inner, different[-1]]
    ticks = [(place(mark), f"{mark:.3g}") for mark in marks]
    return Scale(name, [None if value is None else place(value) for value in values], ticks)


def parallel_plot(view: View, canvas: Canvas) -> Figure | None:
    """Plots a line for each trial through its values to its score; axes stand on a wide page, lie on a narrow one."""
    axes = scales(view)
    if len(axes) < 2 or not any(trial.rank for trial in view.trials):
        return None
    wide = canvas is svg.WIDE
    figure, (ax,) = svg.blank_figure(canvas, 400 if wide else 84 * len(axes) + 40)
    ax.set_axis_off()
    scored = sum(trial.rank is not None for trial in view.trials)
    for number, trial in reversed(list(enumerate(view.trials))):
        places = [scale.places[number] for scale in axes]
        line = [(at, place) for at, place in enumerate(places) if place is not None]
        if trial.rank is None or len(line) < 2:
            continue
        xs, ys = zip(*line, strict=True)
        style: dict[str, Any] = {"color": color(trial, scored), "zorder": 3 if trial.rank == 1 else 2}
        style |= {"lw": 2.4 if trial.rank == 1 else 1.1, "alpha": 1.0 if trial.rank == 1 else 0.75}
        ax.plot(*((xs, ys) if wide else (ys, [-x for x in xs])), **style)
    for at, scale in enumerate(axes):
        _axis(ax, at, scale, wide=wide, last=at == len(axes) - 1)
    if wide:
        ax.set_xlim(-0.35, len(axes) - 0.65)
        ax.set_ylim(-0.08, 1.12)
    else:
        ax.set_xlim(-0.06, 1.06)
        ax.set_ylim(-len(axes) + 0.55, 0.5)
    return figure


def _axis(ax: Axes, at: int, scale: Scale, *, wide: bool, last: bool) -> None:
    ends = ([at, at], [0, 1]) if wide else ([0, 1], [-at, -at])
    ax.plot(*ends, color=svg.MUTED, lw=1.2, zorder=1)
    box = {"facecolor": svg.PANEL, "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
    title: dict[str, Any] = {"color": svg.INK, "fontweight": "bold" if last else "normal", "va": "bottom", "zorder": 4}
    if wide:
        ax.text(at, 1.06, scale.name, ha="center", **title)
    else:
        ax.text(0, -at + 0.13, scale.name, ha="left", bbox=box, **title)
    shown: list[float] = []
    for place, text in scale.ticks:
        if any(abs(place - other) < (0.045 if wide else 0.12) for other in shown):
            continue
        shown.append(place)
        style: dict[str, Any] = {"color": svg.MUTED, "fontsize": 10.5, "zorder": 4, "bbox": box}
        if wide:
            ax.text(at + (0.04 if last else -0.04), place, text, ha="left" if last else "right", va="center", **style)
        else:
            ax.text(place, -at - 0.08, text, ha="center", va="top", **style)


def _short(path: str, view: View) -> str:
    """Returns the end of a path, as much of it as tells it from the others."""
    parts = path.split(".")
    for size in range(1, len(parts)):
        name = ".".join(parts[-size:])
        if sum(other == name or other.endswith(f".{name}") for other in view.parameters) == 1:
            return name
    return path


def short_names(view: View) -> dict[str, str]:
    """Returns a short name for each parameter's path."""
    return {path: _short(path, view) for path in view.parameters}


def _text(value: Any) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
