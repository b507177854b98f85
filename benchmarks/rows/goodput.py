"""How much of the time is useful where processes are killed again and again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.recipe.run import CONTINUOUS
from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.process import Event, Trace
from benchmarks.sizes import Size
from benchmarks.table import Chart, Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "goodput"
TITLE = "goodput under kill -9, relative to an undisturbed run"
ENDLESS = 1_000_000
"""More steps than any process comes to before it is killed."""
WARM_UP = 3
"""Steps of an undisturbed process that do not count."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How long processes live.

    Attributes:
        period: Seconds from a process's start to its death.
        goal: Goodput that is to be reached, in percent.
        was: The goal before it was lowered.
        kinds: Other sides that are measured; all where None.
        lives: Processes one after the other.
        undisturbed: Steps over which the undisturbed rate is taken.
    """

    period: float
    goal: float
    was: float | None = None
    kinds: Sequence[str] | None = None
    lives: int = 3
    undisturbed: int = 30

    def num_bytes(self, size: Size) -> float:
        """Returns about what one side writes, at a checkpoint every two seconds."""
        return size.bytes * self.period * self.lives / 2


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    plans = [Plan(30.0, 80, was=90), Plan(60.0, 90, kinds=["script"])]
    if bench.options.quick:
        plans = [Plan(20.0, 0, lives=2, undisturbed=10)]
    theirs.inputs(size)
    sides = {plan: ["ours", *(theirs.kinds() if plan.kinds is None else plan.kinds)] for plan in plans}
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds():
        for plan in plans:
            for side in sides[plan]:
                bench.say(f"{side}, a kill every {plan.period:g} s")
                measured = (
                    _ours(bench, ours, plan, size) if side == "ours" else _theirs(bench, theirs, plan, size, side)
                )
                rate, useful, ready, every = measured
                name, goodput = f"{side} {plan.period:g}", 100 * useful / rate
                keep(columns, {f"{name} goodput": goodput, f"{name} lost": plan.period * (1 - goodput / 100)})
                keep(columns, {f"{side} undisturbed": rate, f"{name} bound": 100 * (1 - ready / plan.period)})
                keep(columns, {f"{name} every": every})

    def figure(what: str, unit: str, name: str, other: str = "script", **goal: float | None) -> Figure:
        found = {"ours": columns[f"ours {name}"], "theirs": columns[f"{other} {name}"]}
        return Figure(what=what, unit=unit, other=other, **found, **goal)  # type: ignore[arg-type]

    figures = [figure("undisturbed steps per second", "", "undisturbed")]
    for plan in plans:
        often, at = f"a kill every {plan.period:g} s", f"{plan.period:g}"
        figures += [figure(f"goodput, {often}", "%", f"{at} goodput", at_least=plan.goal, was=plan.was)]
        figures += [figure(f"goodput, {often}", "%", f"{at} goodput", side) for side in sides[plan][2:]]
        figures += [
            figure(f"its bound, {often}", "%", f"{at} bound"),
            figure(f"seconds lost, {often}", "s", f"{at} lost"),
            figure(f"seconds between checkpoints, {often}", "s", f"{at} every"),
        ]
    lines = {
        side: [(plan.period, statistics.median(columns[f"{side} {plan.period:g} goodput"])) for plan in plans]
        for side in ("ours", "script")
    }
    return Row(
        title=TITLE,
        conditions=f"{size}; {plans[0].lives} lives of each length; cold processes, one torch thread on each side",
        preparation="neither side",
        figures=figures,
        charts={"kills": Chart(title="Goodput under kill -9", unit="%", across="seconds between kills", lines=lines)},
        notes=[
            "useful: steps in the newest complete checkpoint at the last kill, by all the time since the first start",
            "bound: what is left of a life after its first step, in which nothing is lost and checkpoints cost nothing",
            "lost per kill: interpreter, imports, restore, steps trained again, and what the checkpoints cost",
            "interval: ours, one checkpoint after another; the other sides' by Young and Daly, √(2 × stall × seconds "
            "between kills), from a stall measured in the same round, but no shorter than an upload",
            "the goal for a kill every 30 s was 90 % until 2026-11-23; its bound was then measured at 79 %",
            *theirs.notes(),
        ],
    )


Measured = tuple[float, float, float, float]
"""Steps a second: undisturbed, and kept where processes are killed. Seconds: to a life's first step, between
checkpoints."""


def _ours(bench: Bench, ours: Ours, plan: Plan, size: Size) -> Measured:
    run = ours.run(size, steps=ENDLESS)
    rate = _rate(ours.chunk(run, 1, until=_reaches(WARM_UP + plan.undisturbed)), plan)
    bench.server.expect(plan.num_bytes(size))
    run = ours.run(size, steps=ENDLESS, every=CONTINUOUS)
    lives = [ours.chunk(run, 1, after=plan.period) for _ in range(plan.lives)]
    useful = ours.committed(run) / sum(life.seconds for life in lives)
    ours.rewind(run)
    apart = [b["at"] - a["at"] for life in lives for a, b in pairwise(life.all("checkpoint"))]
    return rate, useful, _ready(lives), statistics.median(apart or [plan.period])


def _theirs(bench: Bench, theirs: Theirs, plan: Plan, size: Size, kind: str) -> Measured:
    bench.server.expect(size.bytes)
    last, uri = WARM_UP + plan.undisturbed, theirs.begin("undisturbed")
    trace = theirs.process(uri, size, kind=kind, steps=ENDLESS, target=last)
    saved, stepped = trace.at("saved"), trace.at("step", step=last)
    every = max(math.sqrt(2 * (saved - stepped) * plan.period), trace.at("put") - stepped)
    bench.server.expect(plan.num_bytes(size))
    uri = theirs.begin("goodput")
    lives = [
        theirs.process(uri, size, kind=kind, steps=ENDLESS, target=ENDLESS, seconds=every, after=plan.period)
        for _ in range(plan.lives)
    ]
    useful = theirs.newest(uri) / sum(life.seconds for life in lives)
    theirs.begin("goodput")
    return _rate(trace, plan), useful, _ready(lives), every


def _ready(lives: Sequence[Trace]) -> float:
    """Returns the seconds from a process's start to its first step."""
    return statistics.median(life.at("step") - life.spawned for life in lives)


def _reaches(step: int) -> Callable[[Event], bool]:
    return lambda event: event["event"] == "step" and event["step"] == step


def _rate(trace: Trace, plan: Plan) -> float:
    last = WARM_UP + plan.undisturbed
    return plan.undisturbed / (trace.at("step", step=last) - trace.at("step", step=WARM_UP))
