"""The report's plots, as inline SVG in the page's light or dark theme; the same report gives the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from baton.pages import svg
from baton.pages.collect import ChunkAttempts, RunReport
from baton.pages.html import duration
from baton.recipe.methods import SPECS

PHASES = {
    "start": ("start-up", svg.GREY),
    "import": ("import", svg.MUTED),
    "fetch": ("fetch", svg.SKY),
    "build": ("build", svg.PURPLE),
    "restore": ("restore", svg.ORANGE),
    "train": ("train", svg.BLUE),
    "save": ("save", svg.AMBER),
    "upload": ("upload", svg.GREEN),
}
MAX_ATTEMPT_ROWS = 120
MAX_STAGE_ROWS = 24


def draw(report: RunReport) -> dict[str, Markup]:
    """Returns all plots that have something to show, by name."""
    plots = {
        "loss": ("Training and eval loss by step", loss_plot),
        "method": (
            "What the method logs beside the loss, by step",
            lambda report: _small_plots(report, SPECS[report.method].logged),
        ),
        "optimization": (
            "Learning rate and gradient norm by step",
            lambda report: _small_plots(report, {"learning_rate": "learning rate", "grad_norm": "gradient norm"}),
        ),
        "throughput": ("Throughput of each chunk by step", throughput_plot),
        "attempts": ("Time of each chunk attempt by phase", attempt_plot),
        "stages": ("Time of each pipeline stage", stage_plot),
    }
    return svg.draw_all(plots, report)


def loss_plot(report: RunReport) -> Figure | None:
    train, evals = svg.series(report.losses, "loss"), svg.series(report.log, "eval_loss")
    if not len(train[0]) and not len(evals[0]):
        return None
    figure, (ax,) = svg.blank_figure(380)
    svg.curve(ax, train, "train")
    if len(evals[0]):
        style = "-o" if len(evals[0]) <= 60 else "-"
        ax.plot(*svg.thin(evals), style, color=svg.ORANGE, lw=1.2, ms=5, label="eval")
    if len(train[1]):
        _log_if_wide(ax, train[1], 200)
    _mark_levels(ax, report)
    _step_axis(ax, report)
    _mark_interruptions(ax, report)
    _mark(ax, report.skipped, 1, "v", svg.AMBER, "step skipped")
    ax.set_ylabel("loss")
    for handle in figure.legend(loc="outside upper left", ncols=4).get_lines():
        handle.set_linewidth(max(1.5, handle.get_linewidth()))
    return figure


def _small_plots(report: RunReport, names: Mapping[str, str]) -> Figure | None:
    series = {name: svg.series(report.losses, key) for key, name in names.items()}
    curves = {name: points for name, points in series.items() if len(points[0])}
    if not curves:
        return None
    columns = min(2, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure, axes = svg.blank_figure(210 * rows, rows, columns)
    for ax, (name, points) in zip(axes, curves.items(), strict=False):
        svg.curve(ax, points, name, smooth=name != "learning rate")
        if name == "gradient norm":
            _log_if_wide(ax, points[1], 100)
        elif name == "learning rate" and ax.get_ylim()[0] < points[1].max() / 10:
            ax.set_ylim(bottom=0)
        ax.set_ylabel(name)
        _step_axis(ax, report, labels=False)
    for ax in axes[len(curves) :]:
        ax.remove()
    return figure


def throughput_plot(report: RunReport) -> Figure | None:
    rates = [
        (attempt, (attempt.to_step - attempt.from_step) / attempt.seconds["train"])
        for attempt in report.chunk_attempts
        if attempt.to_step > attempt.from_step and attempt.seconds.get("train", 0.0) > 0
    ]
    unit = "steps"
    if report.plan and any(attempt.tokens for attempt, _ in rates):
        unit, per_epoch = "tokens", report.plan.steps_per_epoch
        rates = [(attempt, rate * attempt.tokens / per_epoch) for attempt, rate in rates if attempt.tokens]
    if not rates:
        return None
    figure, (ax,) = svg.blank_figure(190)
    starts, ends, heights = zip(*((attempt.from_step, attempt.to_step, rate) for attempt, rate in rates), strict=True)
    ax.bar(starts, heights, np.subtract(ends, starts), align="edge", color=svg.BLUE, alpha=0.3, lw=0)
    ax.hlines(heights, starts, ends, color=svg.BLUE, lw=2)
    ax.set_ylim(0, max(heights) * 1.1)
    ax.set_ylabel(f"{unit} per second")
    ax.yaxis.set_major_formatter(FuncFormatter(svg.compact))
    _step_axis(ax, report)
    _mark_interruptions(ax, report)
    return figure


def attempt_plot(report: RunReport) -> Figure | None:
    rows = _attempt_rows(report.chunks)
    if not rows:
        return None
    values = [np.array([row[phase] for _, row, _ in rows]) for phase in PHASES]
    figure, ax, scale = _bar_figure([label for label, *_ in rows], np.sum(values, axis=0), [note for *_, note in rows])
    left = np.zeros(len(rows))
    for (label, color), seconds in zip(PHASES.values(), values, strict=True):
        ax.barh(range(len(rows)), seconds / scale, 0.76, left, color=color, label=label, lw=0)
        left += seconds / scale
    figure.legend(loc="outside upper left", ncols=8, handlelength=0.9)
    return figure


def stage_plot(report: RunReport) -> Figure | None:
    stages: dict[str, float] = {}
    for stage, spent in report.stages.items():
        name = "".join(character for character in stage if character.isprintable())
        name = name if len(name) <= 24 else f"{name[:23]}…"
        stages[name] = stages.get(name, 0.0) + spent
    if len(stages) > MAX_STAGE_ROWS:
        stages = _merge_numbered(stages)
    if not stages:
        return None
    seconds = np.array(list(stages.values()))
    figure, ax, scale = _bar_figure(list(stages), seconds, [""] * len(stages))
    ax.barh(range(len(stages)), seconds / scale, 0.7, color=svg.BLUE, lw=0)
    return figure


def _log_if_wide(ax: Axes, values: np.ndarray, ratio: float) -> None:
    if values.min() > 0 and values.max() / np.median(values) > ratio:
        ax.set_yscale("log")


def _step_axis(ax: Axes, report: RunReport, *, labels: bool = True) -> None:
    """Draws the step axis over the whole plan, with a thin line at each hand-over."""
    ends = report.targets
    last = max([*ends, *(entry["step"] for entry in report.losses[-1:]), ax.get_xlim()[1] if not ends else 1])
    svg.step_axis(ax, last)
    line_width = 0.9 if len(ends) <= 30 else 0.4
    room = (svg.WIDTH - 120) / max(len(ends), 1)
    apart, every = (next((n for n in (1, 2, 5, 10, 20, 50) if n * room >= width), 100) for width in (7, 62))
    ax.vlines(ends[apart - 1 : -1 : apart], 0, 1, transform=ax.get_xaxis_transform(), color=svg.GREY, lw=line_width)
    if not labels:
        return
    for index, (start, end) in enumerate(pairwise([0, *ends]), 1):
        if every == 1 or index % every == 0:
            ax.annotate(
                f"chunk {index}", ((start + end) / 2, 1), (0, 3), ax.get_xaxis_transform(),
                "offset points", ha="center", va="bottom", fontsize=10.5, color=svg.MUTED,
            )  # fmt: skip


def _mark_interruptions(ax: Axes, report: RunReport) -> None:
    steps = [attempt.to_step for attempt in report.chunk_attempts if attempt.outcome in ("partial", "failed")]
    _mark(ax, steps, 0, "X", svg.PURPLE, "attempt interrupted")


def _mark(ax: Axes, steps: Sequence[int], height: float, marker: str, color: str, label: str) -> None:
    if steps:
        ax.plot(
            steps, [height] * len(steps), marker, ms=8, color=color, mec="none", clip_on=False,
            transform=ax.get_xaxis_transform(), label=label, zorder=5,
        )  # fmt: skip


def _mark_levels(ax: Axes, report: RunReport) -> None:
    measured = {name: report.figures(name).get("loss") for name in ("before", "after")}
    levels = {name: float(value) for name, value in measured.items() if value is not None and math.isfinite(value)}
    for value in levels.values():
        ax.axhline(value, color=svg.GREEN, lw=1.1, ls=(0, (5, 4)))
    low, high = sorted(ax.get_ylim())
    crowded = len(levels) == 2 and abs(levels["before"] - levels["after"]) < 0.13 * (high - low)
    upper = max(levels, key=lambda name: levels[name], default="")
    for name, value in levels.items():
        offset = (15 if name == upper else -15) if crowded else 0
        ax.annotate(
            f"{name}\n{value:.2f}", (1, value), (6, offset), ax.get_yaxis_transform(), "offset points",
            va="center", fontsize=10.5, color=svg.GREEN, annotation_clip=False,
        )  # fmt: skip


def _attempt_rows(chunks: Sequence[ChunkAttempts]) -> list[tuple[str, dict[str, float], str]]:
    """Returns label, seconds by phase and a note for each attempt, or for each chunk where attempts are many."""
    by_chunk = sum(len(chunk.attempts) for chunk in chunks) > MAX_ATTEMPT_ROWS
    rows: list[tuple[str, dict[str, float], str]] = []
    for chunk in chunks:
        name = f"{'spare' if chunk.spare else 'chunk'} {chunk.index}"
        seconds = [{phase: attempt.seconds.get(phase) or 0.0 for phase in PHASES} for attempt in chunk.attempts]
        count = len(seconds)
        if by_chunk and count:
            total = {phase: sum(part[phase] for part in seconds) for phase in PHASES}
            rows.append((name, total, f"{count} attempts" if count > 1 else ""))
            continue
        for number, (attempt, part) in enumerate(zip(chunk.attempts, seconds, strict=True), 1):
            note = "" if attempt.outcome == "done" else attempt.outcome.replace("_", " ")
            rows.append((f"{name}, attempt {number}" if count > 1 else name, part, note))
    return rows


def _merge_numbered(stages: Mapping[str, float]) -> dict[str, float]:
    """Joins `train chunk 1` … `train chunk 100` to `train chunk × 100`."""
    bases = [re.sub(r"\W*\d+$", "", name) for name in stages]
    merged: dict[str, float] = {}
    for base, seconds in zip(bases, stages.values(), strict=True):
        name = f"{base} × {bases.count(base)}" if bases.count(base) > 1 else base
        merged[name] = merged.get(name, 0.0) + seconds
    return merged


def _bar_figure(labels: Sequence[str], seconds: np.ndarray, notes: Sequence[str]) -> tuple[Figure, Axes, float]:
    """Returns an empty bar plot with row labels and times at the bars' ends, and its unit of time in seconds."""
    row_height = 25 if len(labels) <= 16 else 17 if len(labels) <= 40 else 10
    figure, (ax,) = svg.blank_figure(row_height * len(labels) + 84)
    unit, scale = next((u for u in (("hours", 3600), ("minutes", 60)) if seconds.max() > 3 * u[1]), ("seconds", 1))
    every = 1 if row_height > 10 else 5
    ticks = [row for row in range(len(labels)) if every == 1 or row % every == 0]
    ax.set_yticks(ticks, [labels[row] for row in ticks])
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_xlim(0, max(float(seconds.max()) / scale, 1e-9) * 1.16)
    ax.grid(visible=False)
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0, labelcolor=svg.INK)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(unit)
    ax.xaxis.set_major_locator(MaxNLocator(8))
    for row, (value, note) in enumerate(zip(seconds, notes, strict=True)):
        if every == 1 or note:
            text = duration(float(value)) + (f", {note}" if note else "")
            ax.annotate(
                text, (float(value) / scale, row), (5, 0), "data", "offset points", va="center",
                fontsize=min(10.5, row_height - 1), color=svg.PURPLE if note else svg.MUTED,
            )  # fmt: skip
    return figure, ax, float(scale)
