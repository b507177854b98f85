"""Runs schedules of a scenario, and what is true after each: a fresh process ends the run, and nothing is left over."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from baton.errors import BatonError, DamagedError, UnavailableError
from tools.schedules.actors import House
from tools.schedules.invariants import Step, Truth
from tools.schedules.scenarios import Scenario
from tools.schedules.scheduler import Choices, Scheduler, Scripted, StuckError
from tools.schedules.store import NONE, Server

WAYS = ("wander", "rank", "rank", "wander")


@dataclass
class Result:
    """What came of the schedules of a scenario.

    Attributes:
        scenario: Its name.
        schedules: How many were run.
        orders: Hashes of the calls to the store in their order, with what befell them: how many different ones.
        calls: Calls to the store in all.
        seconds: Time they took.
        broken: Seed or script, and what it broke.
    """

    scenario: str
    schedules: int = 0
    orders: set[int] = field(default_factory=set)
    calls: int = 0
    seconds: float = 0.0
    broken: list[tuple[object, list[tuple[int, str]]]] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Adds what came of others; seconds are those of all processes together."""
        self.schedules += other.schedules
        self.orders |= {hash((other.scenario, order)) for order in other.orders}
        self.calls += other.calls
        self.seconds += other.seconds
        self.broken += other.broken

    def cells(self) -> tuple[str, ...]:
        """Returns a line of the table."""
        counts = f"{self.schedules:,}", f"{len(self.orders):,}", f"{self.calls:,}", f"{self.seconds:,.0f}"
        return (self.scenario, *counts, str(len(self.broken)))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Logs nothing: schedules are full of warnings that are due."""
    logger = logging.getLogger("baton")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@silence()
def run(scenario: Scenario, choices: Choices, way: str, log: list[str] | None = None, changes: int = 3) -> House:
    """Runs one schedule, and what comes after it."""
    objects, lineage = before(scenario)
    server = Server(scenario.conditional, NONE, dict(objects), links=scenario.links, lineage=dict(lineage))
    scheduler = Scheduler(choices, way, changes)
    truth = Truth(server, strict=scenario.strict, one_winner=scenario.one_winner, rots=scenario.rots)
    server.scheduler, server.faults, server.left, server.log = scheduler, scenario.faults, scenario.faults.most, log
    scheduler.deliver = server.deliver
    house = House(server, scheduler, truth, scenario.keep, copies=scenario.copies)
    for name, work in scenario.actors.items():
        scheduler.spawn(name, partial(work, house), skew=scenario.skews.get(name, 0.0))
    try:
        scheduler.run()
    except StuckError as error:
        truth.fail(6, str(error))
    for actor in scheduler.actors:
        if isinstance(actor.error, Exception) and not _is_due(scenario, actor.error):
            truth.fail(6, f"{actor.name}: {type(actor.error).__name__}: {actor.error}")
    _end(house, scenario)
    return house


_ended: dict[object, list[tuple[int, str]]] = {}
"""What broke after schedules that left the same objects: it depends on these alone."""


@contextlib.contextmanager
def nothing_remembered() -> Iterator[None]:
    """Keeps what was found out with other code apart."""
    before = dict(_ended)
    _ended.clear()
    try:
        yield
    finally:
        _ended.clear()
        _ended.update(before)


def _end(house: House, scenario: Scenario) -> None:
    house.server.settle()
    objects = ((path, data) for path, (data, _) in house.server.objects.items() if "/records/" not in path)
    shared: dict[int, list[str]] = {}
    for path in sorted(house.server.objects) if scenario.copies else ():
        shared.setdefault(house.server.lineage[path], []).append(path)
    groups = frozenset(tuple(paths) for paths in shared.values() if len(paths) > 1)
    key = hash((scenario.name, house.truth.verified, frozenset(objects), groups, house.truth.raced))
    if key not in _ended:
        if len(_ended) > 200_000:
            _ended.clear()
        before = len(house.truth.broken)
        _afterwards(house, scenario)
        _ended[key] = house.truth.broken[before:]
    else:
        house.truth.broken += _ended[key]


def _is_due(scenario: Scenario, error: Exception) -> bool:
    """Tells whether an actor may fail so in this scenario."""
    if isinstance(error, UnavailableError):
        return scenario.faults.most > 0 or scenario.faults.lags or bool(scenario.faults.jumps)
    return scenario.faults.lags and isinstance(error, DamagedError)


def _afterwards(house: House, scenario: Scenario) -> None:
    """Brings the run to its end, and takes away what is left."""
    newest = house.truth.newest_valid()
    try:
        reached = house.restore(None, house.open(None, "last"), scenario.target + 1)
        if reached != newest:
            house.truth.fail(6, f"step {reached} is restored at the end, {newest} could be")
        # What has rotted unseen may be copied once: the next process finds that in the copy, and sends all.
        for _ in range(2 if scenario.copies and scenario.rots else 1):
            if house.truth.newest_valid() < scenario.target:
                house.train(None, scenario.target)
        if house.truth.newest_valid() < scenario.target:
            house.truth.fail(6, f"a fresh process ends at step {house.truth.newest_valid()}")
        house.scheduler.now += 26 * 3600.0
        house.prune(None)
        house.prune(None)
    except (BatonError, OSError) as error:
        house.truth.fail(6, f"afterwards: {type(error).__name__}: {error}")
    _nothing_left(house)
    house.truth.end_apart()


def _nothing_left(house: House) -> None:
    steps = house.truth.steps
    newest = house.truth.newest_valid()
    # Where several stay, one of them may have rotted without anybody having read it since.
    stays = Step.is_sized if house.keep.last > 1 else Step.is_valid
    kept = {number: step.newest() for number, step in steps.items() if stays(step)}
    for number, step in steps.items():
        mine = kept.get(number)
        left = [name for name in step.attempts if not mine or name != mine[1]]
        if left and number <= newest:
            house.truth.fail(8, f"step {number}: {left} are left")


_committed: dict[tuple[object, ...], tuple[dict[str, tuple[bytes, float]], dict[str, int]]] = {}


def before(scenario: Scenario) -> tuple[dict[str, tuple[bytes, float]], dict[str, int]]:
    """Returns the objects that a scenario begins with, an old run's, and their lineage; made once."""
    key = (scenario.before, scenario.conditional, scenario.copies, scenario.links)
    if key not in _committed:
        server = Server(True, links=scenario.links)
        scheduler = Scheduler(Scripted([]))
        truth = Truth(server, strict=False, one_winner=True, rots=False)
        house = House(server, scheduler, truth, scenario.keep, copies=scenario.copies)
        server.scheduler = scheduler
        # A link shows the age of what it shares: hours, where that tells.
        apart = 7200.0 if scenario.links else 1.0
        scheduler.now -= apart * len(scenario.before) if scenario.links else 0.0
        for step in scenario.before:
            scheduler.now += apart
            house.commit(None, house.open(None, f"b{step}"), step)
        _committed[key] = server.objects, server.lineage
    return _committed[key]


def run_seed(scenario: Scenario, seed: int, choices: Choices, log: list[str] | None = None) -> House:
    """Runs the schedule of a seed."""
    return run(scenario, choices, WAYS[seed % len(WAYS)], log, changes=1 + seed % 5)


def explore(scenario: Scenario, seeds: range, *, until: Callable[[Result], bool] = lambda result: False) -> Result:
    """Runs a schedule for each seed.

    Args:
        scenario: Who is at work.
        seeds: The schedules.
        until: Ends it early.
    """
    result = Result(scenario.name)
    began = time.perf_counter()
    for seed in seeds:
        choices = Choices(seed)
        house = run_seed(scenario, seed, choices)
        _count(result, house, seed)
        if until(result):
            break
    result.seconds = time.perf_counter() - began
    return result


def exhaust(scenario: Scenario, changes: int, most: int) -> tuple[Result, bool]:
    """Runs all schedules with so few changes of actor that nobody asks for, and tells whether they were all."""
    result = Result(f"{scenario.name}, all with ≤ {changes} changes")
    began = time.perf_counter()
    script: list[int] | None = []
    while script is not None and result.schedules < most:
        choices = Scripted(script)
        house = run(scenario, choices, "bound", changes=changes)
        _count(result, house, script)
        script = choices.next_script()
    result.seconds = time.perf_counter() - began
    return result, script is None


def _count(result: Result, house: House, name: object) -> None:
    result.schedules += 1
    result.calls += house.scheduler.steps
    result.orders.add(hash(tuple(house.server.order)))
    if house.truth.broken:
        result.broken.append((name, house.truth.broken))
