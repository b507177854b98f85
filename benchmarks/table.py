"""Figures, what they are held against, and how they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured thing, a value a round on each side.

    Attributes:
        what: What was measured.
        unit: Unit of `ours` and `theirs`.
        ours: Our values.
        theirs: Values of what ours is compared with, round by round.
        other: What that is, such as `script`.
        ratio: What the goal speaks of, round by round; `ours` where there is none.
        ratio_unit: Unit of `ratio`: `×` or `%`.
        at_least: The goal, as a lower bound of the median.
        at_most: The goal, as an upper bound of the median.
        was: An earlier goal that was stricter, None where none was.
    """

    what: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float] = ()
    other: str = ""
    ratio: Sequence[float] = ()
    ratio_unit: str = "×"
    at_least: float | None = None
    at_most: float | None = None
    was: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the median meets the goal, None where there is none."""
        values = self.ratio or self.ours
        if not values or self.at_least is self.at_most is None:
            return None
        median = statistics.median(values)
        return (self.at_least is None or median >= self.at_least) and (self.at_most is None or median <= self.at_most)

    @property
    def goal(self) -> str:
        """The goal in words."""
        unit = self.ratio_unit if self.ratio else f" {self.unit}"
        bounds = (("≥", self.at_least), ("≤", self.at_most))
        goal = ", ".join(f"{sign} {bound:g}{unit}" for sign, bound in bounds if bound is not None)
        return goal if self.was is None else f"{goal} (was {self.was:g}{unit})"

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, medians and spreads included."""
        medians = {name: spread(getattr(self, name)) for name in ("ours", "theirs", "ratio") if getattr(self, name)}
        return {**asdict(self), "goal": self.goal, "met": self.met, "median_min_max": medians}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a picture of a row shows: bars, each of its parts, or lines.

    Attributes:
        title: What stands above it.
        unit: What its values are in.
        bars: Name of a bar → part of it → value.
        lines: Name of a line → its points, x and y.
        across: What x is.
    """

    title: str
    unit: str
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    across: str = ""

    @classmethod
    def of_splits(cls, title: str, splits: Mapping[str, Mapping[str, Sequence[float]]]) -> Self:
        """Returns a bar for each side, of the medians of its parts."""
        bars = {side: {part: statistics.median(found[part]) for part in found} for side, found in splits.items()}
        return cls(title=title, unit="s", bars=bars)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one benchmark found.

    Attributes:
        title: What it is about.
        conditions: What was trained, how often, with what.
        preparation: On which sides the preparation of data counts.
        figures: What was measured.
        splits: Side → phase → seconds, a value a round.
        notes: What one must know to read the figures.
        charts: Pictures by the ends of their files' names.
    """

    title: str
    conditions: str
    preparation: Literal["both sides", "neither side", "no other side"]
    figures: list[Figure]
    splits: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    charts: dict[str, Chart] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {**asdict(self), "figures": [figure.to_json() for figure in self.figures]}


def faster(
    what: str, ours: Sequence[float], theirs: Sequence[float], other: str, *, unit: str = "s", **goal: Any
) -> Figure:
    """Returns a figure of times: how many times theirs is ours."""
    ratio = [b / a for a, b in zip(ours, theirs, strict=True)]
    return Figure(what=what, unit=unit, ours=ours, theirs=theirs, other=other, ratio=ratio, **goal)


def share(what: str, ours: Sequence[float], of: Sequence[float], other: str, *, unit: str, **goal: Any) -> Figure:
    """Returns a figure whose ratio is what part of theirs is ours."""
    ratio = [a / b for a, b in zip(ours, of, strict=True)]
    return Figure(what=what, unit=unit, ours=ours, theirs=of, other=other, ratio=ratio, **goal)


def keep(columns: dict[str, list[float]], values: dict[str, float]) -> None:
    """Adds a round's values to the lists of their names."""
    for name, value in values.items():
        columns.setdefault(name, []).append(value)


def spread(values: Sequence[float]) -> list[float]:
    """Returns median, least and greatest."""
    return [statistics.median(values), min(values), max(values)]


def show(name: str, row: Row, console: Console) -> None:
    """Prints a row for people."""
    console.print(f"\n[bold]{name}[/bold]  {row.title}\n[dim]{row.conditions}[/dim]", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "ours", "compared with", "ratio", "goal", "met"):
        table.add_column(heading, justify="left" if heading in ("", "goal") else "right")
    for figure in row.figures:
        theirs = f"{figure.other} {cell(figure.theirs, figure.unit)}" if figure.theirs else ""
        ratio = cell(figure.ratio, figure.ratio_unit)
        table.add_row(figure.what, cell(figure.ours, figure.unit), theirs, ratio, figure.goal, _met(figure))
    console.print(table)
    if row.splits:
        console.print(_split_table(row.splits))
    for note in row.notes:
        console.print(f"[dim]· {note}[/dim]", highlight=False)


def _split_table(splits: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("seconds in")
    for side in splits:
        table.add_column(side, justify="right")
    for phase in dict.fromkeys(phase for found in splits.values() for phase in found):
        table.add_row(phase, *(cell(found.get(phase, []), "") for found in splits.values()))
    return table


def _met(figure: Figure) -> str:
    if figure.met is None:
        return "–" if figure.goal else ""
    return "[green]yes[/green]" if figure.met else "[red]no[/red]"


def cell(values: Sequence[float], unit: str) -> str:
    """Returns a median with least and greatest, in few characters."""
    if not values:
        return ""
    median, least, greatest = (_number(value) for value in spread(values))
    unit = unit if unit in ("×", "%", "") else f" {unit}"
    return f"{median}{unit}" if len(values) == 1 else f"{median}{unit} ({least}–{greatest})"


def _number(value: float) -> str:
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"
