"""Pictures for the docs: SVG files that stand alone, the same bytes for the same values."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from baton.pages import svg

PANEL = "#fefefe"
"""Background of a picture."""


def picture(name: str, title: str, plot: Callable[[], Figure]) -> str:
    """Returns a plot under its title as an SVG document with a background of its own.

    Args:
        name: Makes the ids in the SVG its own.
        title: What stands above the plot.
        plot: Makes the figure.
    """
    style: Any = {**svg.STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = plot()
        figure.suptitle(title, color=svg.INK, fontsize=12, x=0.01, ha="left")
        figure.patch.set(visible=True, facecolor=PANEL)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return re.sub(r"\.(\d\d)\d+", r".\1", drawn.getvalue())
