"""How much of the time is useful where processes are killed again and again."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.bench import Bench
from tests.bench.ours import Ours
from tests.bench.process import Event, Trace
from tests.bench.sizes import Size
from tests.bench.table import Figure, Row, keep
from tests.bench.theirs import Theirs

NAME = "goodput"
TITLE = "useful steps under kill -9, as a share of those of a process that nobody kills"
ENDLESS = 1_000_000
"""More steps than any process comes to before it is killed."""
WARM_UP = 3
"""Steps of an undisturbed process that do not count."""


@dataclass(frozen=True)
class Plan:
    """How long processes live.

    Attributes:
        period: Seconds from a process's start to its death.
        lives: Processes one after the other.
        every: Seconds between checkpoints.
        undisturbed: Steps over which the undisturbed rate is taken.
    """

    period: float
    lives: int
    every: int
    undisturbed: int

    def num_bytes(self, size: Size) -> float:
        """Returns about what one side writes."""
        return size.bytes * self.period * self.lives / self.every


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    plan = Plan(15.0, 2, 2, 10) if bench.options.quick else Plan(30.0, 4, 4, 30)
    theirs.inputs(size)
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds(dear=True):
        ours_rate, ours_useful = _ours(bench, ours, plan, size)
        their_rate, their_useful = _theirs(bench, theirs, plan, size)
        for side, rate, useful in (("ours", ours_rate, ours_useful), ("script", their_rate, their_useful)):
            goodput = 100 * useful / rate
            keep(columns, {f"{side} goodput": goodput, f"{side} steps": useful, f"{side} undisturbed": rate})
            keep(columns, {f"{side} lost": plan.period * (1 - goodput / 100)})

    def figure(what: str, unit: str, name: str, **goal: float) -> Figure:
        sides = {"ours": columns[f"ours {name}"], "theirs": columns[f"script {name}"]}
        return Figure(what=what, unit=unit, other="script", **sides, **goal)  # type: ignore[arg-type]

    lost = {side: statistics.median(columns[f"{side} lost"]) for side in ("ours", "script")}
    return Row(
        title=TITLE,
        conditions=f"{size}; killed {plan.period:g} s after each start, {plan.lives} lives, a checkpoint every "
        f"{plan.every} s; one torch thread on each side",
        figures=[
            figure("goodput", "%", "goodput", at_least=90),
            figure("useful steps per second", "", "steps"),
            figure("undisturbed steps per second", "", "undisturbed"),
            figure("seconds lost per kill", "s", "lost"),
        ],
        notes=[
            "useful: steps in the newest complete checkpoint at the last kill, by all the time since the first start",
            "lost per kill: interpreter, imports, restore, steps trained again, and what the checkpoints cost; at "
            f"that loss 90 % takes a kill every {10 * lost['ours']:.0f} s at most, the script every "
            f"{10 * lost['script']:.0f} s",
        ],
    )


def _ours(bench: Bench, ours: Ours, plan: Plan, size: Size) -> tuple[float, float]:
    run = ours.run(size, steps=ENDLESS)
    rate = _rate(ours.chunk(run, 1, until=_reaches(WARM_UP + plan.undisturbed)), plan)
    bench.server.expect(plan.num_bytes(size))
    run = ours.run(size, steps=ENDLESS, every=f"{plan.every}s")
    lives = [ours.chunk(run, 1, after=plan.period) for _ in range(plan.lives)]
    useful = ours.committed(run) / (lives[-1].ended - lives[0].spawned)
    ours.rewind(run)
    return rate, useful


def _theirs(bench: Bench, theirs: Theirs, plan: Plan, size: Size) -> tuple[float, float]:
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
    return rate, useful


def _reaches(step: int) -> Callable[[Event], bool]:
    return lambda event: event["event"] == "step" and event["step"] == step


def _rate(trace: Trace, plan: Plan) -> float:
    last = WARM_UP + plan.undisturbed
    return plan.undisturbed / (trace.at("step", step=last) - trace.at("step", step=WARM_UP))
