"""A family of runs, drawn: a row for each run, below its parent and to the right of it."""

from __future__ import annotations

from functools import partial

from markupsafe import Markup
from matplotlib.figure import Figure

from baton.components.shared.pages import svg
from baton.components.shared.pages.svg import Canvas
from baton.components.shared.runs import lineage
from baton.components.shared.runs.lineage import Family, Member

MAX_ROWS = 60
ROW = 26
"""Height of a row."""
COLORS = {"done": svg.GREEN, "trained": svg.GREEN, "unfinished": svg.BLUE, "rejected": svg.ORANGE}
"""State → colour of a run's dot; grey for the others."""


def draw(members: Family, chosen: str | None = None) -> Markup | None:
    """Returns the tree as inline SVG, None where there is no run.

    Args:
        members: The runs.
        chosen: Name of the one whose page it is.
    """
    rows = list(lineage.walk(members))
    if not rows:
        return None
    return svg.draw("family", "Which run comes from which", partial(_plot, rows[:MAX_ROWS], len(rows), chosen))


def _plot(rows: list[tuple[int, Member, bool]], total: int, chosen: str | None, canvas: Canvas) -> Figure:
    wide = canvas is svg.WIDE
    more = total - len(rows)
    count = len(rows) + (more > 0)
    figure, (ax,) = svg.blank_figure(canvas, ROW * count * (1 if wide else 2) + 8)
    ax.set_axis_off()
    height = 1 if wide else 2
    ax.set_xlim(0, canvas.width)
    ax.set_ylim(count * height, 0)
    last_at: dict[int, float] = {}
    indent = 28 if wide else 18
    for number, (depth, member, _) in enumerate(rows):
        x, y = 10.0 + indent * depth, number * height + 0.5
        if depth:
            left = x - indent
            ax.plot([left, left, x], [last_at[depth - 1], y, y], color=svg.RULE, lw=1.3, zorder=1)
        last_at[depth] = y
        hue = COLORS.get(member.state, svg.GREY)
        ax.plot([x], [y], "o", ms=8, color=hue, zorder=3, clip_on=False)
        weight = "bold" if member.name == chosen else "normal"
        caption = " · ".join(part for part in (_steps(member), member.words) if part)
        left, top, room = x + 12, y + 0.75, 60 - 3 * depth
        if wide:
            left, top, room = x + 26 + 7.2 * len(member.name), y, 130 - 4 * depth - len(member.name)
        name = member.name if wide else _cut(member.name, 44)
        ax.text(x + 12, y, name, va="center", color=svg.INK, fontweight=weight)
        ax.text(left, top, _cut(caption, room), va="center", color=svg.MUTED, fontsize=11.5 if wide else 10.5)
    if more:
        ax.text(10, (count - 0.5) * height, f"and {more} more", va="center", color=svg.MUTED)
    return figure


def _steps(member: Member) -> str:
    if member.state == "gone":
        return "gone"
    length = f" of {member.num_steps:,}" if member.num_steps else ""
    return f"step {member.step:,}{length}"


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: max(size - 1, 1)]}…"
