"""What a simulated process has of its machine: time, names, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TypeVar

from baton.runtime import Runtime
from tools.schedules.scheduler import Actor, Scheduler

T = TypeVar("T")
R = TypeVar("R")


class Machine(Runtime):
    """What an actor's process takes from its machine: simulated time, names in their order."""

    def __init__(self, actor: Actor | None, scheduler: Scheduler, prefix: str = "") -> None:
        self.actor = actor
        self.scheduler = scheduler
        self.skew = actor.skew if actor else 0.0
        self._prefix, self._names = prefix or (actor.name if actor else "before"), 0

    def process(self) -> object:
        """Returns the actor's process, which another thread of this one may simulate at the same time."""
        return self.actor.process if self.actor else self._prefix

    def monotonic(self) -> float:
        """Returns the simulated time: clocks differ, but run alike."""
        return self.scheduler.now

    def now(self) -> datetime:
        """Returns the time by this machine's clock."""
        return datetime.fromtimestamp(self.scheduler.now + self.skew, UTC)

    def sleep(self, seconds: float) -> None:
        """Lets the others run."""
        if self.actor:
            self.scheduler.sleep(self.scheduler.current or self.actor, seconds)
        else:
            self.scheduler.now += seconds

    def unique(self) -> str:
        """Returns a name that nobody else has."""
        self._names += 1
        return f"{self._prefix}{self._names:03d}".rjust(12, "0")

    def uniform(self, low: float, high: float) -> float:
        """Returns the middle."""
        return (low + high) / 2

    def begin(self, work: Callable[[], None], name: str) -> Beside:
        """Begins a thread of the same process."""
        assert self.actor
        return Beside(self.scheduler.spawn(name, lambda _: work(), process=self.actor.process), self.scheduler)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Does one after the other, in an order that is drawn; others have their turns in between."""
        listed = list(items)
        results: dict[int, R] = {}
        for place in self.scheduler.choices.shuffled(len(listed)):
            results[place] = work(listed[place])
        return [results[place] for place in range(len(listed))]


class Beside:
    """A thread that a process has begun."""

    def __init__(self, actor: Actor, scheduler: Scheduler) -> None:
        self._actor, self._scheduler = actor, scheduler

    def is_alive(self) -> bool:
        """Tells whether it is still at work."""
        return not self._actor.done

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        assert self._scheduler.current
        self._scheduler.wait(self._scheduler.current, lambda: self._actor.done, timeout)


class Flag:
    """An event of a simulated process, in place of `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def set(self) -> None:
        """Sets it."""
        self._is_set = True

    def is_set(self) -> bool:
        """Tells whether it is set."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or for so many seconds."""
        assert self._scheduler.current
        self._scheduler.wait(self._scheduler.current, self.is_set, timeout)
        return self._is_set
