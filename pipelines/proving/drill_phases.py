"""The phases of a train chunk in which a drill kills it: told from events, dealt like cards, and struck."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

from baton.components.shared.core import events
from baton.components.shared.core.events import Event

PHASES = ("start-up", "restore", "first-step", "training", "snapshot", "upload", "commit", "prune")
"""In the order in which a chunk comes to them; the last three happen beside training."""
AT_ONCE = 0.001
"""Seconds below which a kill does not wait for a timer."""
ONCE = ("start-up", "restore", "first-step")
"""Phases that a process comes to once."""
PASSED_BY = 0.3
"""Chance that a kill lets a phase go by once that a process comes to again and again."""
UNKNOWN = 0.005
"""Seconds that a phase is taken to last when none was measured."""


class Tracker:
    """Tracks the phases of a process by its events.

    Args:
        begins: What it does before its first event.

    Attributes:
        step: The last step that it told.
        pruned: The step of the removal that it began last.
        seconds: How long each phase that it came to lasted, once for each time that is known.
    """

    def __init__(self, begins: str = "start-up") -> None:
        self.step = 0
        self.pruned: int | None = None
        self.seconds: dict[str, list[float]] = {}
        self._lanes = {"main": (begins, time.monotonic()), "beside": ("", 0.0)}
        self._came_from = 0
        self._imports = self._trains = False

    @property
    def phases(self) -> list[str]:
        """Its phases: on the training thread first, then beside it."""
        return [phase for phase, _ in self._lanes.values() if phase]

    def since(self, phase: str) -> float | None:
        """Returns when it began what it is doing, None if it does something else."""
        return next((began for name, began in self._lanes.values() if name == phase), None)

    def heard(self, event: Event) -> str | None:
        """Takes note of an event and returns the phase that begins with it, if one does."""
        self.step = max(self.step, getattr(event, "step", None) or 0)
        match event:
            case events.Phase(phase, step):
                return self._phase(phase, step)
            case events.Step() if self.since("first-step"):
                return self._enter("main", "training")
            case events.Checkpoint() | events.Superseded():
                return self._enter("beside", "")
            case events.Verified() | events.AlreadyDone():
                self._enter("main", "end")
                return self._enter("beside", "")
        return None

    def _phase(self, name: str, step: int | None) -> str | None:
        match name:
            case "import":
                self._imports = True
            case "fetch" | "build" if self._imports:
                return self._enter("main", "build")
            case "restore":
                self._came_from = step or 0
                return self._enter("main", "restore" if step else "build")
            case "train":
                entered, self._trains = "training" if self._trains else "first-step", True
                return self._enter("main", entered)
            case "save":
                return self._enter("main", "snapshot")
            case "upload" if step is None:
                return self._enter("main", "end")
            case "upload":
                if self.since("snapshot"):
                    self._enter("main", "")
                return self._enter("beside", "upload")
            case "commit":
                return self._enter("beside", "commit")
            case "prune":
                self.pruned = step
                return self._enter("beside", "prune")
        return None

    def _enter(self, lane: str, phase: str) -> str | None:
        before, began = self._lanes[lane]
        now = time.monotonic()
        if before == phase != "prune":
            return None
        if before and not (before == "prune" and phase == "upload"):  # nobody tells when a chunk's removals are over
            # Losses are told every few steps only, so what is timed as the first step may be several.
            steps = max(1, self.step - self._came_from) if before == "first-step" else 1
            self.seconds.setdefault(before, []).append((now - began) / steps)
        self.seconds.setdefault(phase, [])
        self._lanes[lane] = (phase, now)
        return phase or None


class Deck:
    """Phases in random order, again and again, so that each is asked for about as often.

    Args:
        phases: The phases that can be reached.
        usual: How long each lasts, once for each time that an undisturbed run was in it.
        processes: Train chunks of that run.
        random: Decides everything.
    """

    def __init__(
        self, phases: Sequence[str], usual: Mapping[str, Sequence[float]], processes: int, random: Random
    ) -> None:
        self.phases = list(phases)
        self._random = random
        self._longest = {phase: statistics.median(usual.get(phase) or [UNKNOWN]) for phase in phases}
        self._often = {phase for phase in phases if len(usual.get(phase, ())) >= 3 * processes}
        self._cards: list[str] = []

    def top(self) -> str:
        """Returns the phase that is asked for now."""
        if not self._cards:
            self._cards = self._random.sample(self.phases, len(self.phases))
        return self._cards[-1]

    def done(self, *, hit: bool) -> None:
        """Takes the top card off; after a kill that came too late for its phase it stays, to be tried again."""
        if hit:
            self._cards.pop()
        else:
            self.late(self._cards[-1])

    def late(self, phase: str) -> None:
        """Kills sooner after the phase begins, the next time."""
        self._longest[phase] /= 2

    def drop(self) -> str:
        """Asks no more for the top phase, and returns it."""
        phase = self.top()
        self.phases.remove(phase)
        self._cards = [card for card in self._cards if card != phase]
        return phase

    def passes(self, phase: str) -> bool:
        """Decides whether a kill lets a phase go by that begins now."""
        return phase in self._often and self._random.random() < PASSED_BY

    def delay(self, phase: str) -> float:
        """Returns after how many seconds of a phase that begins now to kill."""
        return self._random.uniform(0, self._longest[phase])


class Strike:
    """One kill, waiting for its phase in one process; a process that comes to it does not get away.

    Args:
        deck: Says for which, and how long after it begins.
        tracker: Where the process is.
        kill: Kills it.

    Attributes:
        phase: The phase.
        struck_at: When it was killed, None while it was not.
    """

    def __init__(self, deck: Deck, tracker: Tracker, kill: Callable[[], None]) -> None:
        self.phase = deck.top()
        self.struck_at: float | None = None
        self._deck, self._tracker, self._kill = deck, tracker, kill
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._passed = self._late = False
        if tracker.since(self.phase) is not None:
            self._aim()

    def heard(self, event: Event) -> None:
        """Follows the process, and kills it a while after its phase begins."""
        with self._lock:
            if self._tracker.heard(event) == self.phase and self._timer is None and self.struck_at is None:
                self._aim()

    def end(self) -> None:
        """Kills no more."""
        with self._lock:
            if self._timer:
                self._timer.cancel()

    def _aim(self) -> None:
        if not self._passed and self._deck.passes(self.phase):
            self._passed = True
            return
        delay, began = 0.0 if self._late else self._deck.delay(self.phase), self._tracker.since(self.phase)
        if delay < AT_ONCE:
            self._strike()
            return
        self._timer = threading.Timer(delay, self._fire, [began])
        self._timer.daemon = True
        self._timer.start()

    def _fire(self, began: float) -> None:
        with self._lock:
            self._timer = None
            if self._tracker.since(self.phase) == began or self.phase in ONCE:
                self._strike()
            else:  # over before the kill came: it waits for the next time
                self._late = True
                self._deck.late(self.phase)

    def _strike(self) -> None:
        self._kill()
        self.struck_at = time.monotonic()
