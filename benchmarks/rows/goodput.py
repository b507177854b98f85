"""How much of the time is useful where processes are killed again and again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Plan:
    """How long processes live.

    Attributes:
        period: Seconds from a process's start to its death.
        goal: Goodput that is to be reached, in percent.
        lives: Processes one after the other.
        every: Seconds between the script's checkpoints; ours follow each other.
        undisturbed: Steps over which the undisturbed rate is taken.
    """

    period: float
    goal: float
    lives: int = 3
    every: int = 4
    undisturbed: int = 30

    def num_bytes(self, size: Size) -> float:
        """Returns about what one side writes."""
        return size.bytes * self.period * self.lives / self.every


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    plans = [Plan(15.0, 0, 2, 2, 10)] if bench.options.quick else [Plan(30.0, 80), Plan(60.0, 90)]
    theirs.inputs(size)
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds(dear=True):
        for plan in plans:
            measured = {"ours": _ours(bench, ours, plan, size), "script": _theirs(bench, theirs, plan, size)}
            for side, (rate, useful, ready) in measured.items():
                name, goodput = f"{side} {plan.period:g}", 100 * useful / rate
                keep(columns, {f"{name} goodput": goodput, f"{name} lost": plan.period * (1 - goodput / 100)})
                keep(columns, {f"{side} undisturbed": rate, f"{name} bound": 100 * (1 - ready / plan.period)})

    def figure(what: str, unit: str, name: str, **goal: float) -> Figure:
        sides = {"ours": columns[f"ours {name}"], "theirs": columns[f"script {name}"]}
        return Figure(what=what, unit=unit, other="script", **sides, **goal)  # type: ignore[arg-type]

    figures = [figure("undisturbed steps per second", "", "undisturbed")]
    for plan in plans:
        often = f"a kill every {plan.period:g} s"
        figures += [
            figure(f"goodput, {often}", "%", f"{plan.period:g} goodput", at_least=plan.goal),
            figure(f"its bound, {often}", "%", f"{plan.period:g} bound"),
            figure(f"seconds lost, {often}", "s", f"{plan.period:g} lost"),
        ]
    lines = {
        side: [(plan.period, statistics.median(columns[f"{side} {plan.period:g} goodput"])) for plan in plans]
        for side in ("ours", "script")
    }
    return Row(
        title=TITLE,
        conditions=f"{size}; {plans[0].lives} lives of each length; ours: one checkpoint after another, the script: "
        f"one every {plans[0].every} s; cold processes, one torch thread on each side",
        figures=figures,
        charts={"kills": Chart(title="Goodput under kill -9", unit="%", across="seconds between kills", lines=lines)},
        notes=[
            "useful: steps in the newest complete checkpoint at the last kill, by all the time since the first start",
            "bound: what is left of a life after its first step, in which nothing is lost and checkpoints cost nothing",
            "lost per kill: interpreter, imports, restore, steps trained again, and what the checkpoints cost",
        ],
    )


def _ours(bench: Bench, ours: Ours, plan: Plan, size: Size) -> tuple[float, float, float]:
    """Returns steps a second of an undisturbed process, those that count of killed ones, and a life's first step."""
    run = ours.run(size, steps=ENDLESS)
    rate = _rate(ours.chunk(run, 1, until=_reaches(WARM_UP + plan.undisturbed)), plan)
    bench.server.expect(plan.num_bytes(size))
    run = ours.run(size, steps=ENDLESS, every=CONTINUOUS)
    lives = [ours.chunk(run, 1, after=plan.period) for _ in range(plan.lives)]
    useful = ours.committed(run) / (lives[-1].ended - lives[0].spawned)
    ours.rewind(run)
    return rate, useful, _ready(lives)


def _theirs(bench: Bench, theirs: Theirs, plan: Plan, size: Size) -> tuple[float, float, float]:
    uri = theirs.begin("undisturbed")
    rate = _rate(
        theirs.process(uri, size, steps=ENDLESS, target=ENDLESS, until=_reaches(WARM_UP + plan.undisturbed)), plan
    )
    bench.server.expect(plan.num_bytes(size))
    uri = theirs.begin("goodput")
    lives = [
        theirs.process(uri, size, steps=ENDLESS, target=ENDLESS, seconds=plan.every, after=plan.period)
        for _ in range(plan.lives)
    ]
    useful = theirs.newest(uri) / (lives[-1].ended - lives[0].spawned)
    theirs.begin("goodput")
    return rate, useful, _ready(lives)


def _ready(lives: Sequence[Trace]) -> float:
    """Returns the seconds from a process's start to its first step."""
    return statistics.median(life.at("step") - life.spawned for life in lives)


def _reaches(step: int) -> Callable[[Event], bool]:
    return lambda event: event["event"] == "step" and event["step"] == step


def _rate(trace: Trace, plan: Plan) -> float:
    last = WARM_UP + plan.undisturbed
    return plan.undisturbed / (trace.at("step", step=last) - trace.at("step", step=WARM_UP))
