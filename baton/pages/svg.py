"""Parts of plots: colours, axes, thinned points, and inline SVG.

Colours are drawn with their light value and then written as `var(--name, value)`, so that the page's CSS decides. Text
stays text in the page's own font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, RULE = "#1f2a37", "#5b6675", "#d5dae1"
BLUE, ORANGE, GREEN, PURPLE = "#0b68b1", "#c2500a", "#0a7d5f", "#a0468a"
AMBER, SKY, GREY = "#e0a100", "#62b3e4", "#98a2b0"
COLORS = {"ink": INK, "muted": MUTED, "rule": RULE, "blue": BLUE, "orange": ORANGE, "green": GREEN}
COLORS |= {"purple": PURPLE, "amber": AMBER, "sky": SKY, "grey": GREY}
STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "text.parse_math": False,
    "text.color": INK,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 11.5),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), RULE),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
}
WIDTH = 1032  # of a plot; the page's CSS scales it down, and a phone scrolls it sideways
NUM_POINTS = 2000  # of a curve, at most
Points = tuple[np.ndarray, np.ndarray]
T = TypeVar("T")


def draw(name: str, label: str, plot: Callable[[], Figure | None]) -> Markup | None:
    """Draws a plot as `<svg>`, its ids prefixed by `name`; the same values give the same bytes."""
    style: Any = {**STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = plot()
        return Markup(inline_svg(figure, name, label)) if figure is not None else None


def draw_all(plots: Mapping[str, tuple[str, Callable[[T], Figure | None]]], subject: T) -> dict[str, Markup]:
    """Draws plots of one subject by label and function; a plot without content is missing."""
    drawn = {name: draw(name, label, partial(plot, subject)) for name, (label, plot) in plots.items()}
    return {name: plot for name, plot in drawn.items() if plot is not None}


def step_axis(ax: Axes, last: float) -> None:
    ax.set_xlim(0, last)
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(compact))


def series(entries: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Returns the finite values of `key` by step; of a step logged twice, the later entry counts."""
    values = {
        entry["step"]: float(entry[key])
        for entry in entries
        if entry.get(key) is not None and math.isfinite(entry[key])
    }
    steps = sorted(values)
    return np.array(steps, dtype=float), np.array([values[step] for step in steps], dtype=float)


def thin(points: Points, limit: int = NUM_POINTS) -> Points:
    """Returns at most `limit` points: the ends, and the extremes of equal buckets, so no spike is lost."""
    xs, ys = points
    if len(xs) <= limit:
        return points
    edges = np.linspace(0, len(xs), (limit - 2) // 2 + 1).astype(int)
    keep = {0, len(xs) - 1}
    for start, end in pairwise(edges):
        keep |= {start + int(np.argmin(ys[start:end])), start + int(np.argmax(ys[start:end]))}
    index = np.array(sorted(keep))
    return xs[index], ys[index]


def blank_figure(height: int, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    figure.patch.set_visible(False)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.patch.set_visible(False)
        ax.grid(axis="y")
        ax.tick_params(length=3)
    return figure, axes


def curve(ax: Axes, points: Points, label: str, *, smooth: bool = True) -> None:
    """Plots thinned points as a line, and their moving mean where there are many."""
    xs, ys = points
    window = len(xs) // 40
    if not smooth or window < 10:
        ax.plot(*thin(points), color=BLUE, lw=1.4, marker="o" if len(xs) == 1 else None, label=label)
        return
    mean = np.convolve(ys, np.ones(window) / window, mode="valid")
    centred = xs[window // 2 : window // 2 + len(mean)]
    ax.plot(*thin(points), color=BLUE, lw=0.7, alpha=0.4, label=label)
    ax.plot(*thin((centred, mean), NUM_POINTS // 2), color=BLUE, lw=1.8, label=f"{label}, mean of {window:,}")


def compact(value: float, _position: int | None = None) -> str:
    """Writes a tick's number in few characters: `1,234`, `0.5`, `12k`, `3.4M`, `2G`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):g}{suffix}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Returns the figure for the page: own ids, themed colours, the page's font, short numbers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None
    opening = f'<svg class="plot" role="img" aria-label="{escape(label)}" {box[0]}>'
    svg = re.sub(r"<svg[^>]*>", opening, svg, count=1)
    # Several plots share a page, so that their ids must differ.
    svg = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r" font-family: [^;\"]+;?", "", svg)
    svg = re.sub(r' d="[^"]+"', lambda path: re.sub(r"\d+\.\d{2,}", lambda n: f"{float(n[0]):.1f}", path[0]), svg)
    for color, value in COLORS.items():
        svg = svg.replace(value, f"var(--{color}, {value})")
    return re.sub(r"\n\s*", "\n", svg)
