"""What a process takes from its machine: time, names, threads; handed in, so that a test can decide all of it."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")
PARALLEL = 8
"""Calls under way at once."""
_BEHIND = 19
"""Of nice(2): a seventieth of the processor beside a thread that wants all of it."""
_OF_CLIENTS = "tokio-rt-worker"
"""Name of the threads in which the store's client works; they are there from its first use on."""


class Work(Protocol):
    """Work that was begun beside this."""

    def is_alive(self) -> bool:
        """Tells whether it is still under way."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, or for so many seconds."""


class World:
    """This machine's own."""

    def monotonic(self) -> float:
        """Returns seconds on a clock that never goes back."""
        return time.monotonic()

    def now(self) -> datetime:
        """Returns the time of day as this machine has it, which may be wrong."""
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def unique(self) -> str:
        """Returns a name that nobody else has, 32 letters and digits."""
        return uuid.uuid4().hex

    def uniform(self, low: float, high: float) -> float:
        """Draws a number; the global generator is part of the training state."""
        return random.SystemRandom().uniform(low, high)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Calls a function with each item, several at a time, and returns the results in the items' order."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            # The first error cancels what has not begun; it is raised once what is under way has ended.
            return list(pool.map(work, items))

    def begin(self, work: Callable[[], None], name: str) -> Work:
        """Begins work beside this, which has the processor first; it does not keep a process that is to end."""

        def behind() -> None:
            _stand_back()
            work()

        thread = threading.Thread(target=behind, name=name, daemon=True)
        thread.start()
        return thread


def _stand_back() -> None:
    """Gives this thread, those that it starts, and the store client's a low priority, for as long as they live."""
    if sys.platform != "linux":  # elsewhere the priority is the process's
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
            if thread == threading.get_native_id() or file.read().strip() == _OF_CLIENTS:
                os.setpriority(os.PRIO_PROCESS, thread, max(_BEHIND, os.getpriority(os.PRIO_PROCESS, thread)))


REAL = World()
