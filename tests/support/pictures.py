"""Pictures for the docs: SVG files that stand alone, the same bytes for the same values.

Pages are drawn in the browser (`baton.pages.plots`); a picture in the docs must show without script. It has a light and
a dark theme: browsers take that of the page around it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from baton.pages.plots import Plot, thin

PANEL = "#fefefe"
"""Background of a picture."""
COLORS = {
    "ink": "#1f2a37", "muted": "#5b6675", "rule": "#d5dae1",
    "blue": "#0b68b1", "orange": "#c2500a", "green": "#0a7d5f", "purple": "#a0468a",
    "amber": "#e0a100", "sky": "#62b3e4", "grey": "#98a2b0",
}  # fmt: skip
"""As in a page's light theme."""
DARK = {
    PANEL: "#1b2027", "#1f2a37": "#e4e8ed", "#5b6675": "#9aa5b3", "#d5dae1": "#343c47",
    "#0b68b1": "#5aa9ea", "#c2500a": "#f08a4b", "#0a7d5f": "#43c59e", "#a0468a": "#d98bc6",
    "#e0a100": "#e8bb45", "#62b3e4": "#9bd4f5", "#98a2b0": "#78838f",
}  # fmt: skip
INK, MUTED, RULE = COLORS["ink"], COLORS["muted"], COLORS["rule"]
WIDTH = 1032
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


def picture(name: str, title: str, plot: Callable[[], Figure]) -> str:
    """Returns a plot under its title as an SVG document with a background of its own.

    Args:
        name: Makes the ids in the SVG its own.
        title: Text above the plot.
        plot: Makes the figure.
    """
    style: Any = {**STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = plot()
        figure.suptitle(title, color=INK, fontsize=12, x=0.01, ha="left")
        figure.patch.set(visible=True, facecolor=PANEL)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return with_dark_theme(re.sub(r"\.(\d\d)\d+", r".\1", drawn.getvalue()))


def with_dark_theme(svg: str) -> str:
    """Returns a picture with the colours of dark pages beside its own."""
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}: {dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    )
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1)


def blank_figure(height: int, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    axes = list(figure.subplots(rows, 1, squeeze=False).flat)
    for ax in axes:
        ax.patch.set_visible(False)
        ax.grid(axis="y")
        ax.tick_params(length=3)
    return figure, axes


def draw(plots: Sequence[Plot], height: int, num_points: int) -> Figure:
    """Draws plots of a page below each other."""
    figure, axes = blank_figure(height, len(plots))
    for ax, plot in zip(axes, plots, strict=True):
        for curve in plot.curves:
            style = "steps-post" if curve.steps or curve.bars else "default"
            xs, ys = zip(*thin(curve.points, num_points), strict=True)
            ax.plot(xs, ys, color=COLORS[curve.color], lw=curve.width, alpha=curve.alpha, drawstyle=style)
        # As one shape: there may be a thousand of them.
        shape = [point for start, end in plot.bands for point in ((start, 0), (start, 1), (end, 1), (end, 0))]
        if shape:
            xs, ys = zip(*shape, strict=True)
            ax.fill(xs, ys, transform=ax.get_xaxis_transform(), color=COLORS["grey"], alpha=0.25, lw=0)
        ax.set_xlim(0, plot.end)
        ax.set_ylabel(plot.y)
        ax.xaxis.set_major_formatter(FuncFormatter(compact))
        if plot.from_zero:
            ax.set_ylim(0)
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
    axes[-1].set_xlabel(plots[-1].x)
    return figure


def compact(value: float, _position: int | None = None) -> str:
    """Writes a tick's number in few characters: `1,234`, `0.5`, `12k`, `3.4M`, `2G`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):g}{suffix}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
