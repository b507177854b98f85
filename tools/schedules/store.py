"""An object store in memory whose answers are lost, late, or old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tools.schedules.scheduler import Scheduler

LATEST = 60.0
"""Seconds for which a request whose answer was given up may still be on its way."""
LAG = 60.0
"""Seconds for which a listing may show what was before a change."""


@dataclass(frozen=True)
class Faults:
    """What a store and its network may do in a scenario.

    Attributes:
        most: Most faults in one schedule.
        kinds: `refused` has no effect, `lost` has one and no answer, `late` has it after the answer was given up;
            `died` is that the process does, before, after or long before the effect.
        likely: Share of the calls that one of them befalls.
        lags: Whether listings may be old.
        jumps: Seconds by which time may pass between two calls.
        stops: Share of the calls before which that happens.
        prompt: Whether pauses are between requests alone, and none of them is on its way for long.
    """

    most: int = 0
    kinds: tuple[str, ...] = ("refused", "lost", "late", "died")
    likely: float = 0.06
    lags: bool = False
    jumps: tuple[float, ...] = ()
    stops: float = 0.05
    prompt: bool = False


NONE = Faults()


@dataclass
class Change:
    """A change of an object, as the watchers see it; None stands for no object.

    Attributes:
        sent: Where the request was late: how many its actor had made then.
        source: What it is a copy of.
    """

    path: str
    before: bytes | None
    after: bytes | None
    by: str
    sent: int | None = None
    source: str | None = None


@dataclass
class Server:
    """The objects, and what is still on its way to them.

    Attributes:
        links: Whether a copy has its source's bytes, as a hard link does, and not its own.
        lineage: Number of an object's bytes, which such a copy shares.
        rotten: Those that have changed by themselves.
    """

    conditional: bool = True
    faults: Faults = NONE
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    scheduler: Scheduler | None = None
    left: int = 0
    pending: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    recent: list[tuple[float, str, tuple[bytes, float] | None]] = field(default_factory=list)
    looks: dict[tuple[str, str], float] = field(default_factory=dict)
    links: bool = False
    lineage: dict[str, int] = field(default_factory=dict)
    rotten: set[int] = field(default_factory=set)
    watch: Callable[[Change], None] = lambda change: None
    order: list[str] = field(default_factory=list)
    log: list[str] | None = None

    def __post_init__(self) -> None:
        self._number = max(self.lineage.values(), default=0)

    @property
    def now(self) -> float:
        """The store's own clock."""
        return self.scheduler.now if self.scheduler else 1e9

    def put(self, path: str, data: bytes, by: str, *, absent: bool = False, sent: int | None = None) -> bool:
        """Writes an object; with a condition only where there is none."""
        before = self.objects.get(path)
        if absent and self.conditional and before is not None:
            return False
        self._note(path, before)
        self.objects[path] = (data, self.now)
        self.lineage[path] = self._next()
        self.watch(Change(path, before[0] if before else None, data, by, sent))
        return True

    def copy(self, source: str, path: str, by: str, *, sent: int | None = None) -> bool:
        """Copies an object, and tells whether there was one; a link has its source's age and bytes for good."""
        if source not in self.objects:
            return False
        before, (data, at) = self.objects.get(path), self.objects[source]
        self._note(path, before)
        self.objects[path] = (data, at if self.links else self.now)
        self.lineage[path] = self.lineage[source] if self.links else self._next()
        by = "rot" if self.lineage[source] in self.rotten else by
        if by == "rot":
            self.rotten.add(self.lineage[path])
        self.watch(Change(path, before[0] if before else None, data, by, sent, source))
        return True

    def rot(self, path: str, data: bytes) -> None:
        """Changes bytes behind everyone's back, and those of all that share them."""
        self.rotten.add(self.lineage[path])
        for other, number in self.lineage.items():
            if number == self.lineage[path] and other in self.objects:
                before = self.objects[other]
                self._note(other, before)
                self.objects[other] = (data, self.now)
                self.watch(Change(other, before[0], data, "rot"))

    def drop(self, path: str, by: str, *, sent: int | None = None) -> None:
        """Removes an object."""
        before = self.objects.pop(path, None)
        if before is not None:
            self._note(path, before)
            self.watch(Change(path, before[0], None, by, sent))

    def look(self, below: str, by: str) -> dict[str, tuple[bytes, float]]:
        """Returns the objects below a path, and notes when they were last shown to a process."""
        self.looks[by, below] = self.now
        return self.listed(below)

    def listed(self, below: str) -> dict[str, tuple[bytes, float]]:
        """Returns the objects below a path, some of them as they were a while ago."""
        view = self.objects
        if self.recent and self.faults.lags and self.scheduler and self.scheduler.choices.draw() < 0.5:
            view = dict(view)
            seen: set[str] = set()
            for at, path, before in self.recent:
                if self.now - at < LAG and path not in seen and self.scheduler.choices.draw() < 0.4:
                    if before is None:
                        view.pop(path, None)
                    else:
                        view[path] = before
                seen.add(path)
        return {path[len(below) :]: entry for path, entry in view.items() if path.startswith(below)}

    def deliver(self) -> bool:
        """Lets a late request arrive, or not yet."""
        if not self.pending or not self.scheduler:
            return False
        place = 0
        if self.now - self.pending[0][0] <= LATEST:
            if self.scheduler.choices.draw() > 0.1:
                return False
            place = self.scheduler.choices.among(len(self.pending))
        self.order.append(f"late {place}")
        self.pending.pop(place)[1]()
        return True

    def settle(self) -> None:
        """Lets all arrive that is on its way; from here on nothing fails."""
        while self.pending:
            self.pending.pop(0)[1]()
        self.left, self.faults, self.recent = 0, NONE, []

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _note(self, path: str, before: tuple[bytes, float] | None) -> None:
        if self.faults.lags:
            self.recent.append((self.now, path, before))
