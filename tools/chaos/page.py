"""The page of a mean hour: how many kills, what they cost, and that nothing was lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from baton.pages import html, svg
from baton.pages.html import count, duration, number
from tests.support import pictures
from tools.chaos.mean import Mean, Result, Told

BUCKETS = 40
"""Bars of the goodput, at most."""


@dataclass(frozen=True)
class Document:
    """What a page shows: figures first, then runs, then all that happened."""

    seed: int
    created: str
    seconds: float
    wanted: int
    kills: int
    outages: int
    full: int
    can_fill: bool
    failure: str
    runs: list[Result]
    told: list[Told]

    @property
    def disturbed_s(self) -> float:
        """Seconds of the runs that were disturbed."""
        return sum(run.seconds for run in self.runs)

    @property
    def useful(self) -> float:
        """Useful steps a second, while runs were disturbed."""
        return sum(run.useful for run in self.runs) / max(self.disturbed_s, 1e-9)

    @property
    def alone(self) -> float:
        """The same while they were not."""
        spans = [told for told in self.told if told.what == "alone"]
        return sum(told.steps for told in spans) / max(sum(told.seconds for told in spans), 1e-9)

    @property
    def share(self) -> float:
        """Of the steps that were made, how many were of use: the others were made again after a kill."""
        return sum(run.useful for run in self.runs) / max(sum(run.trained for run in self.runs), 1)


def document(mean: Mean, failure: str, began: float) -> Document:
    """Returns what a page shows of a mean hour."""
    what = Counter(told.what for told in mean.told)
    return Document(
        seed=mean.seed,
        created=datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        seconds=max((told.at for told in mean.told), default=0.0),
        wanted=mean.wanted,
        kills=mean.kills,
        outages=what["outage"],
        full=what["full"] if mean.machine.can_fill else 0,
        can_fill=mean.machine.can_fill,
        failure=failure,
        runs=mean.results,
        told=mean.told,
    )


def verdict(document: Document) -> str:
    """Returns the line that sums a mean hour up."""
    told = f"{count(document.kills, 'kill')} in {duration(document.seconds)}"
    if document.failure:
        return f"NOT exact: after {told} a run is not as the undisturbed one"
    runs = count(len(document.runs), "run ends on its", "runs end on their")
    return f"exact: after {told} {runs} undisturbed bits, no row lost or doubled, no file left behind"


def render(document: Document) -> str:
    """Returns the page as one HTML document, which loads nothing."""
    environment = html.environment(Path(__file__).parent)
    plots = {
        "progress": ("Kills and useful steps over time", progress_plot),
        "goodput": ("Useful steps a second over time", goodput_plot),
    }
    kills = [told for told in document.told if told.what == "kill"]
    places = Counter((told.stage.replace("_", " "), told.detail.partition(" (")[0]) for told in kills)
    hours = document.seconds / 3600
    return environment.get_template("chaos.html.j2").render(
        chaos=document,
        verdict=verdict(document),
        tone="bad" if document.failure else "good",
        plots=svg.draw_all(plots, document),
        places=sorted(places.items()),
        stages=Counter(told.stage.replace("_", " ") for told in kills),
        weather=sorted(Counter(told.detail for told in document.told if told.what == "outage").items()),
        tiles=[
            ("Kills", f"{document.kills:,}", f"{number(document.kills / hours if hours else None)} an hour"),
            ("Runs", len(document.runs), f"of {count(len({run.cell for run in document.runs}), 'recipe')}"),
            ("Outages", document.outages, "of the store, 0.3 to 3 s each"),
            (
                "Full disks",
                document.full,
                "memory, disk or cache" if document.can_fill else "no tmpfs to be had",
            ),
            ("Goodput", f"{document.useful:.2f}", f"useful steps a second; {document.alone:.2f} undisturbed"),
            ("Useful", f"{document.share:.0%}", "of the steps that were made"),
        ],
    )


def picture(document: Document) -> str:
    """Returns the curve of kills and useful steps as an SVG that stands alone."""
    title = f"{verdict(document)} (seed {document.seed})"
    return pictures.picture("chaos", title, partial(progress_plot, document, 600))


def progress_plot(document: Document, num_points: int = svg.NUM_POINTS) -> Figure:
    """Draws kills and useful steps as they add up, with the store's outages as bands."""
    figure, (kills, steps) = svg.blank_figure(420, rows=2)
    struck = [told.at for told in document.told if told.what == "kill"]
    useful = [(told.at, told.steps) for told in document.told if told.what == "committed"]
    for ax, times, amounts, color, name in (
        (kills, struck, [1] * len(struck), svg.ORANGE, "kills"),
        (steps, [at for at, _ in useful], [amount for _, amount in useful], svg.BLUE, "useful steps"),
    ):
        xs, ys = np.array([0.0, *times]) / 60, np.cumsum([0, *amounts])
        ax.step(*svg.thin((xs, ys), num_points), where="post", color=color, lw=1.6, gid=name.replace(" ", "-"))
        ax.set_ylabel(name)
        ax.set_ylim(0)
        ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        _time_axis(ax, document)
        # As one shape: an hour has a thousand of them.
        ends = [(told.at / 60, (told.at + told.seconds) / 60) for told in document.told if told.what == "outage"]
        shape = [point for start, end in ends for point in ((start, 0), (start, 1), (end, 1), (end, 0))]
        if shape:
            ax.fill(*zip(*shape, strict=True), transform=ax.get_xaxis_transform(), color=svg.GREY, alpha=0.25, lw=0)
    kills.set_xlabel("")
    kills.tick_params(labelbottom=False)
    return figure


def goodput_plot(document: Document) -> Figure:
    """Draws useful steps a second, what runs alone make as a line."""
    figure, (ax,) = svg.blank_figure(230)
    points = [(told.at, told.steps) for told in document.told if told.what == "committed"]
    alone = [(told.at, told.at + told.seconds) for told in document.told if told.what == "alone"]
    edges = np.linspace(0, max(document.seconds, 1.0), BUCKETS + 1)
    made, _ = np.histogram([at for at, _ in points], edges, weights=[steps for _, steps in points])
    width = edges[1] - edges[0]
    ax.bar(edges[:-1] / 60, made / width, width=width / 60 * 0.92, align="edge", color=svg.BLUE)
    for start, end in alone:
        ax.axvspan(start / 60, end / 60, color=svg.GREEN, alpha=0.14, lw=0)
    ax.axhline(document.alone, color=svg.GREEN, lw=1.2, ls="--")
    ax.axhline(document.useful, color=svg.ORANGE, lw=1.2, ls="--")
    ax.set_ylabel("useful steps / s")
    _time_axis(ax, document)
    return figure


def _time_axis(ax: Axes, document: Document) -> None:
    ax.set_xlim(0, max(document.seconds, 1.0) / 60)
    ax.set_xlabel("minutes")
    ax.xaxis.set_major_locator(MaxNLocator(8))
    ax.xaxis.set_major_formatter(FuncFormatter(svg.compact))
