"""The page of a mean hour: how many kills, what they cost, and that nothing was lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from baton.pages import html, plots
from baton.pages.html import count, duration, number
from baton.pages.plots import Curve, Plot
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
    kills = [told for told in document.told if told.what == "kill"]
    places = Counter((told.stage.replace("_", " "), told.detail.partition(" (")[0]) for told in kills)
    hours = document.seconds / 3600
    return environment.get_template("chaos.html.j2").render(
        chaos=document,
        verdict=verdict(document),
        tone="bad" if document.failure else "good",
        progress=progress_plots(document),
        goodput=goodput_plot(document),
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
    return pictures.picture("chaos", title, partial(pictures.draw, progress_plots(document), 420, 600))


def progress_plots(document: Document) -> list[Plot]:
    """Returns kills and useful steps as they add up, with the store's outages as bands."""
    struck = [(told.at, 1) for told in document.told if told.what == "kill"]
    useful = [(told.at, told.steps) for told in document.told if told.what == "committed"]
    outages = [(told.at / 60, (told.at + told.seconds) / 60) for told in document.told if told.what == "outage"]
    return [
        Plot(
            label=f"{name} over time",
            y=name,
            x="minutes",
            curves=[Curve(name=name, color=color, steps=True, points=_added_up(events))],
            end=_minutes(document),
            bands=outages,
            from_zero=True,
            height=240,
        )
        for events, color, name in ((struck, "orange", "kills"), (useful, "blue", "useful steps"))
    ]


def _added_up(events: list[tuple[float, int]]) -> plots.Points:
    total, points = 0, [(0.0, 0.0)]
    for at, amount in events:
        total += amount
        points.append((at / 60, float(total)))
    return points


def goodput_plot(document: Document) -> Plot:
    """Returns useful steps a second, and their means with and without disturbance."""
    end = _minutes(document)
    width = end / BUCKETS
    made = [0.0] * (BUCKETS + 1)
    for told in document.told:
        if told.what == "committed":
            made[min(int(told.at / 60 / width), BUCKETS - 1)] += told.steps
    made[-1] = made[-2]
    means = (("undisturbed", document.alone, "green"), ("disturbed", document.useful, "orange"))
    return Plot(
        label="Useful steps a second over time",
        y="useful steps / s",
        x="minutes",
        curves=[
            Curve(name="useful steps / s", bars=True, points=[(n * width, v / width / 60) for n, v in enumerate(made)]),
            *(
                Curve(name=f"mean, {name}", points=[(0, mean), (end, mean)], color=color, dash=(6, 4))
                for name, mean, color in means
            ),
        ],
        end=end,
        bands=[(told.at / 60, (told.at + told.seconds) / 60) for told in document.told if told.what == "alone"],
        from_zero=True,
        height=240,
    )


def _minutes(document: Document) -> float:
    return max(document.seconds, 1.0) / 60
