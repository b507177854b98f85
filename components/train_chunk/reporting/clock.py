"""Adds up a chunk's seconds by phase, from the start of its process."""

from __future__ import annotations

import sys
import time

import psutil

from baton.components.shared.core import events
from baton.components.shared.core.state import Phase


class Clock:
    """Splits time into phases; the first runs from the process's start to the first `enter`."""

    def __init__(self) -> None:
        self.began = _began()
        self._since = self.began
        self._phase = Phase.START
        self.seconds: dict[Phase, float] = {}

    def enter(self, phase: Phase, **fields: int) -> None:
        """Ends the phase that runs and starts another; seconds of a phase entered again add up."""
        now = time.time()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
        events.emit(events.Phase(phase=phase.value, **fields))

    def restart(self) -> None:
        """Begins anew: what came before was done beside another process's work."""
        self.began = self._since = time.time()
        self.seconds = {}

    def total(self) -> float:
        """Seconds since the process started."""
        return time.time() - self.began

    def split(self) -> dict[str, float]:
        """Returns seconds per phase, the running one included."""
        running = self.seconds.get(self._phase, 0.0) + time.time() - self._since
        seconds = {**self.seconds, self._phase: running}
        return {phase.value: spent for phase, spent in seconds.items()}

    def trained(self) -> float:
        """Returns the seconds of training, the running ones included."""
        return self.split().get(Phase.TRAIN, 0.0)


def _began() -> float:
    """Returns when this process started, in seconds since the epoch."""
    created: float = psutil.Process().create_time()
    if sys.platform != "linux":
        return created
    # psutil counts there from a boot that is known only to the second: the difference of the two is exact.
    since_boot: float = created - psutil.boot_time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
