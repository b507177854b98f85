"""Actors that run one at a time, each until its next call to the store: greenlets, or threads where there are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

try:
    from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
except ImportError:  # a switch is then one of the operating system's, and takes a hundred times as long
    greenlet = None

LONGEST = 4000
"""Calls after which a schedule counts as one that does not end."""


def is_green() -> bool:
    """Tells whether actors are greenlets."""
    return greenlet is not None


class Died(BaseException):
    """What a killed process is to the test's own."""


class StuckError(Exception):
    """Somebody waits for what never comes."""


class Thread:
    """A thread of this process that does one job after another: making one costs more than a schedule."""

    main = threading.Lock()
    idle: ClassVar[list[Thread]] = []

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.job: Callable[[], None] = lambda: None
        threading.Thread(target=self._work, daemon=True).start()

    @classmethod
    def of(cls, job: Callable[[], None]) -> Thread:
        """Returns a thread that does a job when it is switched to."""
        if not cls.main.locked():
            cls.main.acquire()
        thread = cls.idle.pop() if cls.idle else cls()
        thread.job = job
        return thread

    def switch(self, leaving: Thread | None) -> None:
        """Runs this thread, and returns when the one that is left has its turn again."""
        self.lock.release()
        (leaving.lock if leaving else self.main).acquire()

    def _work(self) -> None:
        while True:
            self.lock.acquire()
            self.job()
            self.idle.append(self)
            self.main.release()


class Green:
    """The same without the operating system."""

    def __init__(self, job: Callable[[], None]) -> None:
        main = getcurrent()
        while main.parent:  # where it goes at its end, whoever has begun it
            main = main.parent
        self._greenlet = greenlet(job, main)
        self.switch: Callable[[Any], object] = lambda leaving: self._greenlet.switch()


@dataclass(eq=False)
class Actor:
    """A thread of a simulated process.

    Attributes:
        name: What the report calls it.
        process: Dies with all of its threads.
        skew: Seconds by which its wall clock differs from the store's.
        wake: When it has slept enough.
        waits: Tells whether what it waits for is there.
    """

    name: str
    process: str
    skew: float = 0.0
    wake: float = 0.0
    waits: Callable[[], bool] | None = None
    done: bool = False
    error: BaseException | None = None
    rank: float = 0.0
    calls: int = 0
    thread: Any = None


class Choices:
    """Every decision of a schedule, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.trace: list[int] = []
        self.draw = self._random.random

    def among(self, count: int) -> int:
        """Draws one of several, and keeps it in the trace."""
        number = int(self.draw() * count)
        self.trace.append(number)
        return number

    def shuffled(self, count: int) -> list[int]:
        """Draws an order."""
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.among(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


class Scripted(Choices):
    """Decisions given in advance, and the first of each where they end; `next_script` counts through all of them."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(0)
        self._script = script
        self._counts: list[int] = []
        self.draw = lambda: 1.0  # nothing by chance

    def among(self, count: int) -> int:
        """Returns the next decision."""
        at = len(self.trace)
        number = self._script[at] if at < len(self._script) else 0
        self._counts.append(count)
        self.trace.append(number)
        return number

    def next_script(self) -> list[int] | None:
        """Returns the decisions of the schedule after this one, None after the last."""
        for at in range(len(self.trace) - 1, -1, -1):
            if self.trace[at] + 1 < self._counts[at]:
                return [*self.trace[:at], self.trace[at] + 1]
        return None


class Scheduler:
    """Decides who runs next.

    Args:
        choices: Where its decisions come from.
        way: `wander` changes actor at random, `rank` runs the highest of a random order and lowers it a few times
            (Burckhardt et al., 2010), `bound` counts through all schedules with so few changes.
        changes: Changes of actor in those where nothing asks for one.

    Attributes:
        now: Seconds of the simulated time.
        steps: Calls so far.
    """

    def __init__(self, choices: Choices, way: str = "wander", changes: int = 2) -> None:
        self.choices = choices
        self.way = way
        self.changes = changes
        self.now = 1e9
        self.steps = 0
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.dead: set[str] = set()
        self.failure: Exception | None = None
        self.deliver: Callable[[], bool] = lambda: False
        self._stay = 0.3 + 0.65 * choices.draw()
        self._lower = {int(choices.draw() * 60) for _ in range(changes)} if way == "rank" else set()
        self._ending = False

    def spawn(self, name: str, work: Callable[[Actor], object], *, process: str = "", skew: float = 0.0) -> Actor:
        """Adds an actor, which begins when it is its turn."""
        actor = Actor(name, process or name, skew)
        actor.rank = self.choices.draw()

        def job() -> None:
            try:
                if not self._ending:
                    work(actor)
            except (Died, Exception) as error:
                actor.error = error
            actor.done = True

        actor.thread = Green(job) if greenlet else Thread.of(job)
        self.actors.append(actor)
        return actor

    def run(self) -> None:
        """Runs all actors to their ends.

        Raises:
            StuckError: they do not come to them.
        """
        while not all(actor.done for actor in self.actors):
            self._next(None).thread.switch(None)
        if self.failure:
            raise self.failure

    def point(self, actor: Actor) -> None:
        """Gives the others a turn; called before whatever the others can see."""
        self.steps += 1
        self.now += 0.01
        if self.steps > LONGEST:
            self._give_up(f"no end after {LONGEST} calls")
        if actor.process in self.dead or self._ending:
            raise Died
        self._switch(actor)
        if actor.process in self.dead or self._ending:
            raise Died

    def sleep(self, actor: Actor, seconds: float) -> None:
        """Lets time pass for an actor."""
        actor.wake = self.now + seconds
        self.point(actor)

    def wait(self, actor: Actor, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Waits until something is so, or for so many seconds."""
        if not condition():
            actor.waits, actor.wake = condition, self.now + seconds if seconds is not None else float("inf")
            self.point(actor)
            actor.waits, actor.wake = None, 0.0

    def kill(self, actor: Actor) -> None:
        """Ends an actor's process, all of its threads."""
        self.dead.add(actor.process)
        raise Died

    def _switch(self, actor: Actor) -> None:
        following = self._next(actor)
        if following is not actor:
            following.thread.switch(actor.thread)

    def _candidates(self) -> Iterator[Actor]:
        for actor in self.actors:
            if not actor.done and (
                actor.waits is None or actor.wake < float("inf") or actor.waits() or actor.process in self.dead
            ):
                yield actor

    def _next(self, current: Actor | None) -> Actor:
        able = list(self._candidates())
        if not able or self._ending:
            if not self._ending:
                self._give_up("everyone waits", raises=False)
            self.current = next(actor for actor in self.actors if not actor.done)
            return self.current
        chosen = able[0] if len(able) == 1 else self._chosen(current, able)
        if chosen.waits is None or not chosen.waits():
            self.now = max(self.now, chosen.wake if chosen.wake < float("inf") else 0.0)
        chosen.wake = 0.0
        self.current = chosen
        while self.deliver():
            pass
        return chosen

    def _chosen(self, current: Actor | None, able: list[Actor]) -> Actor:
        awake = [actor for actor in able if actor.wake <= self.now or (actor.waits and actor.waits())]
        stays = current in awake
        if self.way == "bound":
            pool = awake or able
            if not stays:
                return pool[self.choices.among(len(pool))]
            if self.changes <= 0:
                return current  # type: ignore[return-value]
            # The current one first: the script's zeros are the schedule without a change.
            others = [current, *(actor for actor in able if actor is not current)]
            number = self.choices.among(len(others))
            self.changes -= number > 0
            return others[number]  # type: ignore[return-value]
        draw = self.choices.draw()
        if awake and len(awake) < len(able) and draw < 0.85:
            able = awake
        if self.way == "rank":
            if self.steps in self._lower and current:
                current.rank -= 2.0
            chosen = max(able, key=lambda actor: actor.rank)
            self.choices.trace.append(self.actors.index(chosen))
            return chosen
        if stays and self.choices.draw() < self._stay:
            return current  # type: ignore[return-value]
        return able[self.choices.among(len(able))]

    def _give_up(self, reason: str, *, raises: bool = True) -> None:
        waiting = ", ".join(actor.name for actor in self.actors if not actor.done)
        self.failure = self.failure or StuckError(f"{reason}: {waiting}")
        self._ending = True
        if raises:
            raise Died
