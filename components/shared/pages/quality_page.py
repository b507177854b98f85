"""The page about a run's rows: what stands in the way of training on them, before a GPU is paid for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.components.shared.pages import rendering, rows_page
from baton.components.shared.pages.quality_checks import PAGE, QUALITY, collect, percent, seen
from baton.components.shared.pages.rendering import count
from baton.components.shared.runs.documents.rows import SeenRow
from baton.components.shared.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MARKS = {
    "failed": ("bad", "✗", "not allowed"),
    "warn": ("warn", "!", "look at it"),
    "fixed": ("good", "✓", "dealt with"),
    "ok": ("good", "✓", "fine"),
    "off": ("", "–", "off"),
}
"""Tone, symbol and words of each verdict."""

STATES = {"failed": ("bad", "do not train"), "warn": ("warn", "look first"), "ok": ("good", "ready")}
SIDES = {"train": ("blue", "to train on"), "eval": ("orange", "evaluation"), "test": ("purple", "test")}
HUES = ("blue", "orange", "green", "purple", "amber", "sky")
"""Colours of the languages, the most frequent first; those after them are grey."""


def write(run: Run) -> str:
    """Writes the page of a run from what its stages have found so far.

    Returns:
        The page.
    """
    html = render(collect(run), seen(run))
    run.storage.write(run.path(PAGE), html.encode())
    return html


def refresh(run: Run) -> None:
    """Writes the page of a run again, if it has one: when the rows were split, their tokens were not known."""
    if run.get(QUALITY):
        write(run)


def render(found: dict[str, Any], rows: Sequence[SeenRow] = ()) -> str:
    """Returns the page as one HTML document, which loads nothing.

    Args:
        found: What `quality_checks.collect` returned.
        rows: What `quality_checks.seen` returned.
    """
    environment = rendering.environment(Path(__file__).parent)
    environment.filters |= {"percent": percent}
    tone, word = STATES[found["state"]]
    return environment.get_template("quality.html.j2").render(
        found=found,
        tone=tone,
        word=word,
        marks=MARKS,
        tiles=_tiles(found),
        sides=_sides(found["rows"]),
        languages=_languages(found["languages"]),
        histogram=_histogram(found),
        length_note=_length_note(found),
        rows=rows_page.shown(rows),
    )


def _tiles(quality: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows, lengths = quality["rows"], quality["lengths"]
    tiles = []
    if rows:
        tiles = [
            ("Training rows", f"{rows['train']:,}", f"of {count(rows['looked_at'], 'row')} looked at"),
            ("Held out", f"{rows['eval'] + rows['test']:,}", f"{rows['eval']:,} evaluation, {rows['test']:,} test"),
            ("Dropped", f"{rows['dropped']:,}", "by checks set to fix"),
            ("Mended", f"{rows['mended']:,}", "by checks set to fix"),
            ("Unusable", f"{rows['rejected']:,}", "broken, or without a field"),
        ]
    if lengths:
        tiles.append(("Longest row", f"{lengths['longest']:,}", f"tokens; {lengths['mean']:,.0f} on average"))
    return tiles


def _sides(rows: dict[str, int]) -> list[tuple[str, str, str, float]]:
    """Returns colour, name, count and share of each side that has rows."""
    total = sum(rows.get(side, 0) for side in SIDES)
    return [
        (color, name, f"{rows[side]:,}", rows[side] / total)
        for side, (color, name) in SIDES.items()
        if rows.get(side, 0)
    ]


def _languages(languages: dict[str, Any]) -> list[tuple[str, str, str, float]]:
    """Returns colour, name, no count and share of the most frequent languages, and of the others together."""
    shares = [(code, share) for code, share in languages.get("shares", []) if code != "und"]
    unclear = sum(share for code, share in languages.get("shares", []) if code == "und")
    shown = [(color, code, "", share) for color, (code, share) in zip(HUES, shares, strict=False)]
    rest = {"others": sum(share for _, share in shares[len(HUES) :]), "not clear": unclear}
    return shown + [("grey", name, "", share) for name, share in rest.items() if share > 0]


def _length_note(quality: dict[str, Any]) -> str:
    lengths = quality["lengths"]
    if not lengths:
        return ""
    limit = quality["max_length"]
    if quality["joined"]:
        return f"Rows are joined, and cut into sequences of max_length, {limit:,} tokens."
    if not lengths["over"]:
        return f"Every row fits into max_length, {limit:,} tokens."
    share = percent(lengths["over"] / lengths["rows"])
    rest = "is" if lengths["over"] == 1 else "are"
    return f"{count(lengths['over'], 'row')} ({share}) {rest} longer than max_length, {limit:,} tokens."


def _histogram(quality: dict[str, Any]) -> Any:
    lengths = quality["lengths"]
    if not lengths or not lengths["rows"]:
        return None
    from baton.components.shared.pages import svg

    return svg.draw("lengths", "Rows by their number of tokens", partial(length_plot, quality))


def length_plot(quality: dict[str, Any]) -> Figure | None:
    """Draws the rows by length, what is too long in another colour, and the line of max_length."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    from baton.components.shared.pages import svg

    limit = int(quality["max_length"])
    bars = length_bars(quality["lengths"], limit)
    figure, (ax,) = svg.blank_figure(300)
    for low, high, rows in bars:
        color = svg.ORANGE if low >= limit else svg.BLUE
        ax.bar(low, rows, high - low, align="edge", color=color, alpha=0.75, lw=0)
    ax.axvline(limit, color=svg.INK, lw=1.2, ls=(0, (4, 3)))
    ax.set_xscale("log", base=2)
    left, right = min(bars[0][0], limit) / 1.2, max(bars[-1][1], limit) * 1.2
    ax.set_xlim(left, right)
    place: Any = ("data", "axes fraction")
    ax.annotate(f"max_length {limit:,}", (limit, 1.01), xycoords=place, ha="center", va="bottom", color=svg.INK)
    ax.set_xlabel("tokens in a row")
    ax.set_ylabel("rows")
    ticks = [2**power for power in range(40) if left <= 2**power <= right]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(FixedLocator([]))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(svg.compact))
    return figure


def length_bars(lengths: dict[str, Any], limit: int) -> list[tuple[float, float, int]]:
    """Returns the bars of the histogram: from, to, rows.

    The classes end at powers of two and the middles between them. The one that max_length falls into is cut there, by
    the number of rows that are longer.
    """
    bars: list[tuple[float, float, int]] = []
    over = int(lengths["over"])
    for bound, rows in reversed(lengths["histogram"]):
        is_power = bound & (bound - 1) == 0
        low = bound * 3 / 4 if is_power else bound * 2 / 3
        if low < limit < bound:
            bars.append((limit, bound, min(over, rows)))
            bound, rows = limit, rows - min(over, rows)
        bars.append((low, bound, rows))
        over -= rows if low >= limit else 0
    return bars[::-1]
