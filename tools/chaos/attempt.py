"""One attempt at a stage, and what happens to it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.events import Error, Event
from baton.kfp import processes
from baton.local.forkserver import ForkedProcess
from baton.prove.drill import PhaseTracker
from tests.faults.proxy import FaultyProxy, Rule
from tools.chaos.machine import Machine
from tools.chaos.plan import Plan

HANGS_S = 180.0
"""Seconds after which a stage hangs."""
BLINK_S = 0.03
"""Seconds within which a phase that begins is struck."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        code: Its exit code, below 0 for a signal.
        killed: Whether it was killed from here.
        died_at: Where: the name of the moment, or `any time`.
        phases: Of a chunk that was killed: what it was doing.
        seconds: How long it ran.
        error: The message that it ended with.
        printed: The end of its output.
    """

    code: int
    killed: bool
    died_at: str
    phases: list[str]
    seconds: float
    error: str
    printed: str


class Attempt:
    """A stage that runs while its plan is carried out.

    Args:
        arguments: What it runs, see `tools.chaos.stage`.
        plan: What happens to it.
        usual: Seconds that it takes undisturbed.
        proxy: In front of its store.
        machine: What it runs on.
        on_event: Called with what it tells.
        on_act: Called with what was done to it, `outage` or `full`, which kind, and for how many seconds.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        plan: Plan,
        usual: float,
        proxy: FaultyProxy,
        machine: Machine,
        on_event: Callable[[Event], None],
        on_act: Callable[[str, str, float], None],
    ) -> None:
        self._arguments, self._plan, self._usual = arguments, plan, usual
        self._proxy, self._machine, self._on_event, self._on_act = proxy, machine, on_event, on_act
        self._tracker = PhaseTracker("start-up" if arguments[0] == "train_chunk" else "verifying")
        self._over = threading.Event()
        self._struck = ""
        self._left_to_skip = plan.skip
        self._process: ForkedProcess

    def run(self) -> Ended:
        """Runs it to its end, whatever that is."""
        plan, machine = self._plan, self._machine
        if plan.full and not plan.full_at:
            self._fill()
        began = time.monotonic()
        rule = self._rule()
        self._process = ForkedProcess(
            "tools.chaos.stage", [*self._arguments, "--memory", str(machine.memory), "--disk", str(machine.disk)]
        )
        workers = [threading.Thread(target=self._storm), threading.Thread(target=self._kill, args=(rule,))]
        for worker in workers:
            worker.start()
        try:
            failure: Error | None = processes.follow(self._process, self._heard)
            code = self._process.wait()
        finally:
            self._over.set()
            for worker in workers:
                worker.join()
            self._proxy.clear()
            machine.empty()
            machine.ran[self._process.pid] = time.time()
        killed = bool(self._struck) and code == -signal.SIGKILL
        return Ended(
            code=code,
            killed=killed,
            died_at=self._struck if killed else "",
            phases=self._tracker.phases if killed else [],
            seconds=time.monotonic() - began,
            error=failure.message if failure else "",
            printed=self._process.output(),
        )

    def _rule(self) -> Rule | None:
        moment = self._plan.moment if self._plan.kill else None
        if moment is None or moment.phase:
            return None
        match = {"methods": list(moment.methods), "pattern": moment.pattern, "skip": self._plan.skip, "times": 1}
        if moment.of == "answer":
            return self._proxy.pause_at(of="answer", **match)  # type: ignore[arg-type]
        after = 60 if moment.of == "half" else None
        return self._proxy.stall(after=after, of="request", **match)  # type: ignore[arg-type]

    def _heard(self, event: Event) -> None:
        self._on_event(event)
        phase = self._tracker.heard(event)
        moment = self._plan.moment if self._plan.kill else None
        if phase and moment and moment.phase == phase:
            if not self._left_to_skip:
                threading.Timer(self._plan.share * BLINK_S, self._strike, [moment.name]).start()
            self._left_to_skip -= 1

    def _strike(self, where: str) -> None:
        if not self._struck and not self._over.is_set():
            self._struck = where
            self._process.kill()

    def _kill(self, rule: Rule | None) -> None:
        """Kills at a time, or once a request is held; and what hangs."""
        plan, began = self._plan, time.monotonic()
        # More often soon: little happens late in an export, whose files a fresh interpreter reads.
        share = plan.share if self._arguments[0] == "train_chunk" else plan.share**2
        after = self._usual * (share if plan.moment is None else 1 + plan.share)
        while plan.kill and not self._struck and not self._over.wait(0.01):
            if rule and rule.held:
                assert plan.moment
                self._strike(plan.moment.name)
                rule.remove()
            elif time.monotonic() - began > after:  # a moment that does not come does not spare it
                self._strike("any time")
        if not self._over.wait(HANGS_S - (time.monotonic() - began)):
            self._struck = ""
            self._process.kill()

    def _storm(self) -> None:
        """Fills disks, and takes the store away for a while."""
        plan = self._plan
        acts: list[tuple[float, Callable[[], None]]] = []
        if plan.full and plan.full_at:
            acts.append((plan.full_at * self._usual, self._fill))
        if plan.weather:
            acts.append((plan.weather_at * self._usual, self._take_store_away))
        began = time.monotonic()
        for at, act in sorted(acts, key=lambda pair: pair[0]):
            if self._over.wait(max(0.0, at - (time.monotonic() - began))):
                return
            act()

    def _fill(self) -> None:
        self._machine.fill(self._plan.full)
        self._on_act("full", self._plan.full, 0.0)

    def _take_store_away(self) -> None:
        began = time.monotonic()
        try:
            self._be_away()
        finally:
            self._on_act("outage", self._plan.weather, time.monotonic() - began)

    def _be_away(self) -> None:
        proxy, seconds = self._proxy, self._plan.weather_s
        if self._plan.weather == "cut":
            with proxy.outage():
                self._over.wait(seconds)
            return
        rule = {
            "stalled": lambda: proxy.stall(seconds=seconds),
            "503": lambda: proxy.status(503, "SlowDown"),
            "500": lambda: proxy.status(500, chance=0.7),
            "reset": lambda: proxy.reset(chance=0.7),
            "answers lost": lambda: proxy.lost_answer(chance=0.7),
            "short answers": lambda: proxy.short(after=50, methods="GET", chance=0.7),
        }[self._plan.weather]()
        self._over.wait(seconds)
        rule.remove()
