"""The page of `baton prove`: the verdict, the curves over each other, and the comparison. Same result, same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baton.pages import html, svg
from baton.pages.html import count
from baton.prove.prove import ProofResult, Variant, last_loss

Style = dict[str, Any]

MAX_STRIPES = 4
"""Curves that share the length of a line; with more, the dashes would be too far apart to follow."""


def render(proof: ProofResult) -> str:
    """Returns the page as one HTML document, which loads nothing."""
    environment = html.environment(Path(__file__).parent)
    environment.filters |= {"last_loss": last_loss}
    first = proof["variants"][0]
    plots = {
        "loss": ("Loss of every run by step", loss_plot),
        "drift": ("Difference of every run's loss from the first", drift_plot),
    }
    return environment.get_template("prove.html.j2").render(
        proof=proof,
        first=first,
        first_name=named(first),
        tone=tone(proof),
        verdict=verdict(proof),
        control=control(proof),
        difference=difference_text(proof),
        rows=[(variant, *compared(variant)) for variant in proof["variants"]],
        chunk_counts=listed([f"{variant['chunks']:,}" for variant in proof["variants"]]),
        num_losses=count(len(first["losses"]), "logged loss", "logged losses"),
        num_hidden=sum(not math.isfinite(loss) for variant in proof["variants"] for loss in variant["losses"]),
        plots=svg.draw_all(plots, proof),
    )


def verdict(proof: ProofResult) -> str:
    """Returns the line that sums the comparison up."""
    variants = proof["variants"]
    if proof["exact"]:
        return f"exact: all {len(variants)} runs are the same, byte for byte"
    differing = sum(variant["difference"] is not None for variant in variants)
    verb = "differs" if differing == 1 else "differ"
    return f"NOT exact: {differing} of {len(variants)} runs {verb} from the run in {named(variants[0])}"


def tone(proof: ProofResult) -> str:
    """Returns good, warn or bad. A control is never good news."""
    return "warn" if proof["leave_out"] else "good" if proof["exact"] else "bad"


def control(proof: ProofResult) -> str:
    """Returns a negative control and whether it found anything; empty where nothing was left out."""
    if not proof["leave_out"]:
        return ""
    parts = listed(proof["leave_out"])
    setup = f"This is a negative control: {parts} was not restored at the hand-overs, so the runs must not be the same."
    if proof["exact"]:
        return f"{setup} They are: here it makes no difference, and this page proves nothing about it."
    return f"{setup} They are not, so the comparison does see a part that is missing."


def named(variant: Variant) -> str:
    """Returns `1 chunk`, `5 chunks`."""
    return count(variant["chunks"], "chunk")


def listed(words: Sequence[str]) -> str:
    """Returns `1, 2 and 5`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def compared(variant: Variant) -> tuple[str, str]:
    """Returns a tone and a few words for a run compared with the first."""
    difference = variant["difference"]
    if difference is None:
        return "good", "✓ the same"
    place = f" at value {difference['logged_value']:,}" if "logged_value" in difference else ""
    return "bad", f"✗ {difference['what']}{place}"


def difference_text(proof: ProofResult) -> dict[str, Any] | None:
    """Returns the first difference in words, if any: a sentence, and lines with a name and a value or None."""
    difference = proof["first_difference"]
    if difference is None:
        return None
    first = proof["variants"][0]
    other = next(variant for variant in proof["variants"] if variant["chunks"] == difference["chunks"])
    runs = f"The run in {named(other)} differs from the run in {named(first)}"
    losses = count(len(first["losses"]), "logged loss", "logged losses")
    if difference["what"] == "loss":
        number, step = difference["logged_value"], difference["step"]
        chunk = next(index for index, end in enumerate(other["targets"], 1) if step <= end)
        place = f"value {number:,} of {losses}: step {step:,}, in chunk {chunk} of {other['chunks']}"
        before = f"The {count(number - 1, 'loss', 'losses')} before it {'is' if number == 2 else 'are'} the same."
        sentence = f"{runs} in the loss, first at {place}. {before if number > 1 else ''}"
    elif difference["what"] == "number of losses":
        sentence = f"{runs} in the number of losses it logged; those that both have are the same."
    elif difference["what"] == "weights file":
        sentence = f"{runs} in the weights file. The losses and every part of the last state are the same."
    else:
        part = difference["what"]
        sentence = f"{runs} in the last state, first in the part “{part}”. The {losses} are the same."
    if hooks := "; ".join(difference.get("hooks", ())):
        sentence = f"{sentence.strip()} {hooks[:1].upper()}{hooks[1:]}."
    values = {"expected": repr(difference["expected"]), "found": repr(difference["found"])}
    if isinstance(difference["expected"], str):
        values = {"expected": difference["expected"], "found": str(difference["found"])}
    gap = float(difference["found"]) - float(difference["expected"]) if difference["what"] == "loss" else math.nan
    return {
        "sentence": sentence.strip(),
        "values": [
            (f"Expected, as in {named(first)}", values["expected"]),
            (f"Found in {named(other)}", values["found"]),
            ("Found less expected", f"{gap:+.3g}" if math.isfinite(gap) else None),
        ],
    }


def loss_plot(proof: ProofResult) -> Figure | None:
    """Draws all losses over each other, and each run's chunk ends."""
    variants, lines = proof["variants"], _lines(proof["variants"])
    curves = [svg.series(_entries(variant["steps"], variant["losses"]), "loss") for variant in variants]
    if not any(len(xs) for xs, _ in curves):
        return None
    strip = 20 * len(variants)
    figure, (ax, ends) = svg.blank_figure(400 + strip, rows=2)
    ax.get_gridspec().set_height_ratios([330, strip])  # type: ignore[union-attr]
    for points, variant, line in zip(curves, variants, lines, strict=True):
        marker = "o" if len(points[0]) == 1 else None
        name = f"run-{variant['chunks']}"
        ax.plot(*svg.thin(points), marker=marker, label=named(variant), gid=name, **line)
    ax.set_ylabel("loss")
    _mark_difference(ax, proof)
    _chunk_ends(ends, variants, lines)
    for axes in (ax, ends):
        svg.step_axis(axes, max(variant["targets"][-1] for variant in variants))
    ax.set_xlabel("")
    ax.tick_params(labelbottom=False)
    legend = figure.legend(loc="outside upper left", ncols=6, handlelength=2.6)
    for handle in legend.get_lines()[1:]:
        handle.set_linestyle("--")
    return figure


def drift_plot(proof: ProofResult) -> Figure | None:
    """Draws the difference of each run's losses from the first run's; nothing where no loss differs."""
    variants, lines = proof["variants"], _lines(proof["variants"])
    first = variants[0]["losses"]
    gaps = [[b - a for a, b in zip(first, variant["losses"], strict=False)] for variant in variants]
    if not any(gap and math.isfinite(gap) for values in gaps for gap in values):
        return None
    figure, (ax,) = svg.blank_figure(220)
    for values, variant, line in zip(gaps, variants, lines, strict=True):
        points = svg.series(_entries(variant["steps"], values), "loss")
        ax.plot(*svg.thin(points), **{**line, "ls": "-", "lw": min(line["lw"], 1.3)})
    ax.set_ylabel("difference")
    _mark_difference(ax, proof, relative=True)
    svg.step_axis(ax, max(variant["targets"][-1] for variant in variants))
    return figure


def _lines(variants: Sequence[Variant]) -> list[Style]:
    """Returns a style per run: the first wide and pale; the others' dashes take turns where they run together."""
    colors = cycle((svg.ORANGE, svg.GREEN, svg.PURPLE, svg.AMBER))
    stripes, dash = min(len(variants) - 1, MAX_STRIPES), 4.5
    gap = dash * max(stripes - 1, 0.8)
    dashed = [
        {"color": next(colors), "lw": 1.7, "ls": (dash * (place % MAX_STRIPES), (dash, gap)), "dash_capstyle": "butt"}
        for place in range(len(variants) - 1)
    ]
    return [{"color": svg.BLUE, "lw": 6.5, "alpha": 0.3, "solid_capstyle": "round"}, *dashed]


def _chunk_ends(ax: Axes, variants: Sequence[Variant], lines: Sequence[Style]) -> None:
    for row, (variant, line) in enumerate(zip(variants, lines, strict=True)):
        ax.hlines(row, 0, variant["targets"][-1], color=svg.RULE, lw=1)
        name = f"ends-{variant['chunks']}"
        ax.vlines(variant["targets"], row - 0.34, row + 0.34, color=line["color"], lw=2, clip_on=False, gid=name)
    ax.set_yticks(range(len(variants)), [named(variant) for variant in variants])
    ax.set_ylim(len(variants) - 0.4, -0.6)
    ax.grid(visible=False)
    ax.tick_params(axis="y", length=0, labelcolor=svg.INK)
    ax.spines["left"].set_visible(False)


def _mark_difference(ax: Axes, proof: ProofResult, *, relative: bool = False) -> None:
    """Rings the first loss that differs, and names it over the plot."""
    difference = proof["first_difference"]
    if difference is None or difference["what"] != "loss":
        return
    step, value = difference["step"], float(difference["found"])
    value -= float(difference["expected"]) if relative else 0
    ax.axvline(step, color=svg.INK, lw=0.8)
    if math.isfinite(value):
        ax.plot([step], [value], "o", ms=9, mfc="none", mec=svg.INK, mew=1.5, zorder=6, gid="difference")
    right = step > 0.6 * max(variant["targets"][-1] for variant in proof["variants"])
    ax.annotate(
        f"first difference, value {difference['logged_value']:,}", (step, 1), (5 if right else -5, 3),
        ax.get_xaxis_transform(), "offset points", ha="right" if right else "left", va="bottom", fontsize=10.5,
    )  # fmt: skip


def _entries(steps: Sequence[int], values: Sequence[float]) -> list[dict[str, float]]:
    return [{"step": step, "loss": value} for step, value in zip(steps, values, strict=False)]
