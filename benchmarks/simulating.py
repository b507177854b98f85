"""Sweeps at a size that few machines have, by simulation; `benchmarks.scaling` prints the table.

A trial is a chain of chunks; GPUs take chunks and are preempted. Times are seconds. A chunk that loses its GPU resumes
from its last checkpoint on the next one that is free; the GPU comes back after a while.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is simulated.

    Attributes:
        trials: Configurations.
        rungs: Chunks of a trial; without `eta` there is a rung after each.
        gpus: GPUs, of which a chunk takes one.
        keep: Share of the trials that continues from a rung; 1 trains all to the end.
        eta: Rungs lie after chunks 1, eta, eta² and so on alone, as `sweep.halving` has them.
        chunk: Mean seconds of a chunk's steps.
        spread: Standard deviation of the logarithm of a trial's pace, which holds for all of its chunks.
        start: Seconds from a free GPU to the first step: pod, imports, fetch, restore.
        checkpoint: Seconds of work between two checkpoints.
        away: Mean seconds until a preempted GPU is replaced.
        preemptions: Times that a GPU is preempted, per hour of its use.
        judge: Seconds between the last chunk of a rung and the first of the next, where a rung is a barrier.
    """

    trials: int = 1000
    rungs: int = 20
    gpus: int = 64
    keep: float = 1.0
    eta: int | None = None
    chunk: float = 600.0
    spread: float = 0.3
    start: float = 45.0
    checkpoint: float = 120.0
    away: float = 180.0
    preemptions: float = 0.0
    judge: float = 40.0

    def is_rung(self, chunk: int) -> bool:
        """Tells whether trials are compared after a chunk, counted from 1."""
        return self.eta is None or chunk in {self.eta**level for level in range(chunk)}


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        makespan: Seconds from the first chunk's start to the last one's end.
        bound: Seconds that no order can beat: all chunks over all GPUs, or the longest chain, without preemption.
        chunks: Chunks that were trained.
        busy: Share of the GPUs' time that went into steps that were kept.
        lost: Seconds of steps that were lost to preemption.
        finished: Trials that came to their end.
    """

    makespan: float
    bound: float
    chunks: int
    busy: float
    lost: float
    finished: int

    @property
    def ratio(self) -> float:
        """Makespan over the bound."""
        return self.makespan / self.bound


@dataclass(order=True)
class _Event:
    at: float
    order: int
    kind: str = field(compare=False)
    trial: int = field(compare=False, default=-1)


class Policy(Protocol):
    """Which trials continue, and when."""

    def ready(self) -> Sequence[int]:
        """Returns the trials that can train at the beginning."""

    def done(self, trial: int, rung: int) -> Sequence[int]:
        """Is told that a trial has ended a rung's chunk; returns the trials that can continue from there."""

    def idle(self) -> int | None:
        """Returns a trial to continue where a GPU would be idle."""


class Barriers:
    """A rung begins when the one before has ended for all: the pipeline's loop over the survivors."""

    def __init__(self, setting: Setting, scores: Sequence[float]) -> None:
        self._keep, self._scores = setting.keep, scores
        self._setting = setting
        self._alive = list(range(setting.trials))
        self._waiting = set(self._alive)

    def ready(self) -> Sequence[int]:
        return self._alive

    def done(self, trial: int, rung: int) -> Sequence[int]:
        if not self._setting.is_rung(rung + 1):
            return [trial]
        self._waiting.discard(trial)
        if self._waiting:
            return []
        count = max(round(len(self._alive) * self._keep), 1)
        self._alive = sorted(self._alive, key=self._scores.__getitem__)[:count]
        self._waiting = set(self._alive)
        return self._alive

    def idle(self) -> int | None:
        return None


class Asynchronous:
    """A trial continues as soon as it is among the best share of those that have ended its rung (arXiv:1810.05934)."""

    def __init__(self, setting: Setting, scores: Sequence[float]) -> None:
        self._keep, self._scores, self._setting = setting.keep, scores, setting
        self._fresh = deque(range(setting.trials))
        self._ended: list[list[int]] = [[] for _ in range(setting.rungs)]
        self._promoted: list[set[int]] = [set() for _ in range(setting.rungs)]

    def ready(self) -> Sequence[int]:
        return []

    def done(self, trial: int, rung: int) -> Sequence[int]:
        if not self._setting.is_rung(rung + 1):
            return [trial]
        self._ended[rung].append(trial)
        return []

    def idle(self) -> int | None:
        for rung in range(len(self._ended) - 2, -1, -1):
            ended, promoted = self._ended[rung], self._promoted[rung]
            count = int(len(ended) * self._keep) if self._fresh else max(round(len(ended) * self._keep), 1)
            if len(promoted) < count:
                best = sorted(ended, key=self._scores.__getitem__)[:count]
                trial = next((trial for trial in best if trial not in promoted), None)
                if trial is not None:
                    promoted.add(trial)
                    return trial
        return self._fresh.popleft() if self._fresh else None


class Simulation:
    """One sweep.

    Args:
        setting: What is simulated.
        policy: Which trials continue, and when.
        seed: Of paces, scores and preemptions.
    """

    def __init__(self, setting: Setting, policy: type[Barriers] | type[Asynchronous], seed: int) -> None:
        self.setting, self.random = setting, random.Random(seed)
        drawn = random.Random(seed + 1)
        self.pace = [setting.chunk * drawn.lognormvariate(0, setting.spread) for _ in range(setting.trials)]
        self.policy: Policy = policy(setting, [drawn.gauss(0, 1) for _ in range(setting.trials)])
        self.rung = [0] * setting.trials
        self.left = list(self.pace)
        self.queue: deque[int] = deque(self.policy.ready())
        self.free = setting.gpus
        self.now = self.kept = self.lost = 0.0
        self.chunks = 0
        self.events: list[_Event] = []
        self._order = itertools.count()

    def run(self) -> Outcome:
        """Goes from event to event until nothing is left to do."""
        end = 0.0
        self._fill()
        while self.events:
            event = heapq.heappop(self.events)
            self.now = event.at
            if event.kind == "gpu":
                self.free += 1
            elif event.kind == "release":
                self.queue.append(event.trial)
            else:
                end = self.now
                self._ended(event)
            self._fill()
        work = [rungs * (pace + self.setting.start) for rungs, pace in zip(self.rung, self.pace, strict=True)]
        bound = max(sum(work) / self.setting.gpus, max(work))
        return Outcome(
            makespan=end,
            bound=bound,
            chunks=self.chunks,
            busy=self.kept / (end * self.setting.gpus),
            lost=self.lost,
            finished=self.rung.count(self.setting.rungs),
        )

    def _fill(self) -> None:
        while self.free:
            trial = self.queue.popleft() if self.queue else self.policy.idle()
            if trial is None:
                return
            self.free -= 1
            self._begin(trial)

    def _begin(self, trial: int) -> None:
        setting = self.setting
        needed = setting.start + self.left[trial]
        rate = setting.preemptions / HOUR
        taken = self.random.expovariate(rate) if rate else float("inf")
        if needed <= taken:
            self._add(needed, "chunk", trial)
            return
        worked = max(taken - setting.start, 0.0)
        saved = worked - worked % setting.checkpoint
        self.left[trial] -= saved
        self.kept += saved
        self.lost += worked - saved
        self._add(taken, "release", trial)
        self._add(taken + self.random.expovariate(1 / setting.away), "gpu")

    def _ended(self, event: _Event) -> None:
        trial = event.trial
        self.kept += self.left[trial]
        self.chunks += 1
        rung = self.rung[trial]
        self.rung[trial] += 1
        self.left[trial] = self.pace[trial]
        self.free += 1
        goes_on = [other for other in self.policy.done(trial, rung) if self.rung[other] < self.setting.rungs]
        for other in goes_on:
            self._add(self.setting.judge if self.setting.is_rung(rung + 1) else 0.0, "release", other)

    def _add(self, after: float, kind: str, trial: int = -1) -> None:
        heapq.heappush(self.events, _Event(self.now + after, next(self._order), kind, trial))


def simulate(setting: Setting, policy: type[Barriers] | type[Asynchronous], seed: int = 0) -> Outcome:
    """Returns what comes of one sweep."""
    return Simulation(setting, policy, seed).run()


CASES: dict[str, dict[str, Any]] = {
    "all to the end": {"keep": 1.0},
    "four of five continue": {"keep": 0.8},
    "halving, eta 2": {"keep": 0.5, "eta": 2},
}
RATES = (0.0, 0.1, 0.5, 2.0)
POLICIES = {"barriers": Barriers, "asynchronous": Asynchronous}


def table(setting: Setting) -> list[dict[str, object]]:
    """Returns a row for each case, rate of preemption and policy."""
    rows: list[dict[str, object]] = []
    for name, case in CASES.items():
        for rate in RATES:
            for policy_name, policy in POLICIES.items():
                chosen = Setting(**{**asdict(setting), **case, "preemptions": rate})
                outcome = simulate(chosen, policy)
                rows.append(
                    {"case": name, "rate": rate, "policy": policy_name, "ratio": outcome.ratio, **asdict(outcome)}
                )
    return rows


def print_table(setting: Setting | None = None) -> None:
    """Prints the table as Markdown."""
    columns = (
        "trials",
        "preemptions per GPU-hour",
        "rungs",
        "chunks",
        "makespan h",
        "bound h",
        "over",
        "busy",
        "lost h",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in table(setting or Setting()):
        hours = [f"{float(str(row[name])) / HOUR:.1f}" for name in ("makespan", "bound")]
        lost = f"{float(str(row['lost'])) / HOUR:.0f}"
        print(
            f"| {row['case']} | {row['rate']:g} | {row['policy']} | {row['chunks']:,} | {hours[0]} | {hours[1]} | "
            f"{row['ratio']:.2f}× | {row['busy']:.0%} | {lost} |",
            flush=True,
        )
