"""Plots of pages: curves and marks, which uPlot draws in the reader's browser.

A page holds a plot's values in an attribute of its figure, and `charts.js` draws it there. A reader without script gets
a table of each curve's first, lowest, highest and last value. Colours are names of the page's style.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from markupsafe import Markup

FOLDER = Path(__file__).parent
NUM_POINTS = 1200  # of a curve, at most
DIGITS = 7  # of a value
Points: TypeAlias = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    points: Points
    color: str = "blue"
    width: float = 1.6
    alpha: float = 1.0
    dash: Sequence[float] = ()
    dots: bool = False
    steps: bool = False  # a value holds until the next point
    bars: bool = False  # the same, filled

    def to_json(self) -> dict[str, Any]:
        points = thin(self.points)
        values = {name: value for name, value in vars(self).items() if name != "points"}
        return {**values, "xs": [_short(x) for x, _ in points], "ys": [_short(y) for _, y in points]}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line; `end` is that of a chunk, which begins at `start` and has its text above its middle."""

    at: float
    text: str = ""
    color: str = "grey"
    kind: Literal["end", "event"] = "event"
    start: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"at": self.at, "text": self.text, "color": self.color, "kind": self.kind, "from": self.start}


class Summary(NamedTuple):
    """A curve in four numbers, for readers without script."""

    name: str
    first: float
    lowest: float
    highest: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Plot:
    label: str
    y: str
    curves: Sequence[Curve]
    x: str = "step"
    end: float | None = None  # of the x-axis, where it goes beyond the curves
    marks: Sequence[Mark] = ()
    bands: Sequence[tuple[float, float]] = ()  # shaded from one x to another
    log_x: Literal[0, 2, 10] = 0  # base of a logarithmic axis
    log_y: bool = False
    from_zero: bool = False
    height: int = 320

    @property
    def data(self) -> str:
        """The plot as JSON in ASCII, for an attribute."""
        document = {
            "x": self.x,
            "y": self.y,
            "end": self.end,
            "curves": [curve.to_json() for curve in self.curves],
            "marks": [mark.to_json() for mark in self.marks],
            "bands": [[_short(start), _short(end)] for start, end in self.bands],
            "logX": self.log_x,
            "logY": self.log_y,
            "fromZero": self.from_zero,
            "height": self.height,
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False)

    @property
    def summaries(self) -> Iterator[Summary]:
        for curve in self.curves:
            values = [value for _, value in curve.points]
            yield Summary(curve.name, values[0], min(values), max(values), values[-1])


def plot(label: str, y: str, curves: Sequence[Curve], **settings: Any) -> Plot | None:
    """Returns a plot of the curves that have points; None without any."""
    drawn = [curve for curve in curves if curve.points]
    return Plot(label=label, y=y, curves=drawn, **settings) if drawn else None


def series(entries: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Returns the finite values of `key` by step; of a step logged twice, the later entry counts."""
    values = {
        entry["step"]: float(entry[key])
        for entry in entries
        if entry.get(key) is not None and math.isfinite(entry[key])
    }
    return sorted(values.items())


def thin(points: Points, limit: int = NUM_POINTS) -> Points:
    """Returns at most `limit` points: the ends, and the extremes of equal buckets, so no spike is lost."""
    if len(points) <= limit:
        return points
    num_buckets = (limit - 2) // 2
    edges = [len(points) * bucket // num_buckets for bucket in range(num_buckets + 1)]
    keep = {0, len(points) - 1}
    for start, end in pairwise(edges):
        bucket = range(start, end)
        keep |= {min(bucket, key=lambda at: points[at][1]), max(bucket, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(keep)]


def smoothed(points: Points, share: int = 40, least: int = 10) -> Points:
    """Returns the moving mean over one part in `share` of the points; none where that is under `least` points."""
    window = len(points) // share
    if window < least:
        return []
    total = sum(value for _, value in points[:window])
    means = [(points[window // 2][0], total / window)]
    for at in range(window, len(points)):
        total += points[at][1] - points[at - window][1]
        means.append((points[at - window + 1 + window // 2][0], total / window))
    return means


def with_mean(name: str, points: Points, color: str = "blue") -> list[Curve]:
    """Returns a curve, and its moving mean in front of it where there are many points."""
    if mean := smoothed(points):
        raw = Curve(name=name, points=points, color=color, width=1, alpha=0.35)
        return [raw, Curve(name=f"{name}, smoothed", points=mean, color=color, width=2)]
    return [Curve(name=name, points=points, color=color)]


def spread(points: Points, ratio: float) -> bool:
    """Tells whether the values are all positive and so far apart that a logarithmic axis shows more."""
    values = sorted(value for _, value in points)
    return bool(values) and values[0] > 0 and values[-1] > ratio * values[len(values) // 2]


def chunk_marks(ends: Sequence[int]) -> list[Mark]:
    """Returns a mark at the end of each chunk, with the chunk's name."""
    return [
        Mark(at=end, start=start, kind="end", text=f"chunk {index}")
        for index, (start, end) in enumerate(pairwise([0, *ends]), 1)
    ]


def _short(value: float) -> float:
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")


@cache
def script(live: bool = False) -> Markup:
    """Returns uPlot with its licence, `charts.js`, and for a page that lives `live.js`, as one script."""
    licence = (FOLDER / "uplot/LICENSE.txt").read_text(encoding="utf-8").strip()
    library = (FOLDER / "uplot/uPlot.iife.min.js").read_text(encoding="utf-8").strip()
    ours = [(FOLDER / name).read_text(encoding="utf-8").strip() for name in ("charts.js", "live.js")[: 1 + live]]
    own = "\n".join(ours)
    return Markup(f"\n/* uPlot\n{licence}\n*/\n{library}\n{own}\n")


@cache
def script_digest(live: bool = False) -> str:
    """Returns the script's digest, which a page's policy allows alone."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script(live).encode()).digest()).decode()


@cache
def style() -> Markup:
    return Markup((FOLDER / "uplot/uPlot.min.css").read_text(encoding="utf-8").strip())
