"""How often checkpoints follow each other where one is always on its way, so that they cost training little."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median, median_low

STALL = 0.02
"""Share of the time for which checkpoints may hold training."""
COST = 0.05
"""Share of the time that they may cost in all: the stalls, and what their uploads take from the steps beside them."""
KNOWN = 2
"""Steps of each kind that must be known before an upload can be told to cost anything."""
AGAIN = 16
"""Checkpoints after which one waits for a step beside no upload: steps change as training goes on."""
RECENT = 16
"""Steps and stalls of each kind that are kept."""


class Pace:
    """Tells when the next checkpoint may be taken, from what those before have cost in this process.

    What an upload takes is the difference between the steps beside one and the others, in medians.

    Args:
        monotonic: Clock, in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._idle: deque[float] = deque(maxlen=RECENT)
        self._beside: deque[float] = deque(maxlen=RECENT)
        self._ended: float | None = None  # the first step is none to learn from
        self._was_free = True
        self._began = monotonic()
        self._stalls: deque[float] = deque(maxlen=RECENT)
        self._uploading = 0.0
        self._saves = self._idle_since = 0

    def step(self, *, is_free: bool) -> None:
        """Notes a step's end.

        Args:
            is_free: Whether no checkpoint is on its way.
        """
        now = self._monotonic()
        if self._ended is not None:
            seconds = now - self._ended
            (self._idle if self._was_free else self._beside).append(seconds)
            self._idle_since += self._was_free
            self._uploading += seconds * (not self._was_free)
        self._ended, self._was_free = now, is_free

    def saving(self) -> None:
        """Notes that training is held for a checkpoint."""
        self._began = self._monotonic()

    def saved(self) -> None:
        """Notes that training goes on after it."""
        now = self._monotonic()
        self._stalls.append(now - self._began)
        self._uploading = 0.0
        self._ended, self._was_free = now, False
        self._saves += 1
        self._idle_since = 0

    def is_due(self) -> bool:
        """Tells whether a checkpoint taken now keeps to what they may cost."""
        if len(self._idle) < KNOWN or (self._saves % AGAIN == AGAIN - 1 and not self._idle_since):
            return False
        return self._monotonic() - self._began >= self.interval

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next, at least."""
        # Of two, the lower: whatever else this machine does makes times longer, never shorter.
        stall, slower = median_low(self._stalls) if self._stalls else 0.0, 0.0
        if min(len(self._beside), len(self._idle)) >= KNOWN:
            slower = max(0.0, 1 - median(self._idle) / median_low(self._beside))
        return max(stall / STALL, (stall + slower * self._uploading) / COST)
