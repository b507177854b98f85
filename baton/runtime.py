"""Time, names and threads of a process, and the loop that waits and retries by them.

`Runtime` is handed in, so that a test decides all of it; `SYSTEM` is this machine's own.
"""

import contextlib
import itertools
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from baton.errors import SkipError

T = TypeVar("T")
R = TypeVar("R")
PARALLEL = 8  # calls under way at once
_BEHIND = 19  # of nice(2): a seventieth of the processor next to a busy thread
_OF_CLIENTS = "tokio-rt-worker"  # name of the store client's threads, which begin with its first use


class Work(Protocol):
    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


class Runtime:
    def process(self) -> object:
        """Returns a name of the process that calls."""
        return os.getpid()

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        """Returns this machine's time of day, which may be wrong."""
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def unique(self) -> str:
        return uuid.uuid4().hex

    def uniform(self, low: float, high: float) -> float:
        return random.SystemRandom().uniform(low, high)  # the global generator is part of the training state

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Calls a function with each item, several at a time, and returns the results in the items' order."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            # The first error cancels calls that have not begun, and is raised once those under way have ended.
            return list(pool.map(work, items))

    def begin(self, work: Callable[[], None], name: str) -> Work:
        """Begins work at a low priority in a daemon thread, which keeps no process from its end."""

        def behind() -> None:
            _stand_back()
            work()

        thread = threading.Thread(target=behind, name=name, daemon=True)
        thread.start()
        return thread


def _stand_back() -> None:
    """Gives this thread, those that it starts, and the store client's a low priority for good."""
    if sys.platform != "linux":  # elsewhere the priority is the process's
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
            if thread == threading.get_native_id() or file.read().strip() == _OF_CLIENTS:
                os.setpriority(os.PRIO_PROCESS, thread, max(_BEHIND, os.getpriority(os.PRIO_PROCESS, thread)))


SYSTEM = Runtime()


E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class RetryAttempt:
    """Attempt, numbered from 1, with `pause` seconds to the next one; none begins after `until`."""

    number: int
    pause: float
    until: float
    runtime: Runtime = SYSTEM

    @property
    def is_last(self) -> bool:
        """Whether patience ends before the next attempt; to be read at this attempt's end."""
        return self.runtime.monotonic() + self.pause > self.until


def backoff(
    patience: float,
    *,
    pause: float,
    growth: float = 1.0,
    longest: float = float("inf"),
    jitter: float = 0.0,
    sleep: Callable[[float], object] | None = None,
    runtime: Runtime = SYSTEM,
) -> Iterator[RetryAttempt]:
    """Yields attempts, at least one, with pauses between them, until patience is over: all in seconds.

    The pause grows by the factor `growth` up to `longest`, and varies by the share `jitter`, so that many processes do
    not return at once. `sleep` may return early, such as `Event.wait`.
    """
    until, regular = runtime.monotonic() + patience, pause
    for number in itertools.count(1):
        share = runtime.uniform(1 - jitter, 1 + jitter) if jitter else 1.0
        attempt = RetryAttempt(number, min(regular, longest) * share, until, runtime)
        yield attempt
        if attempt.is_last:
            return
        (sleep or runtime.sleep)(attempt.pause)
        regular = min(regular * growth, longest)


def retry(
    operation: Callable[[], T],
    kind: type[E],
    tries: Iterable[RetryAttempt],
    on_failure: Callable[[E, RetryAttempt], object],
) -> T:
    """Returns an operation's result once it succeeds; raises an error of another kind at once, else the last one."""
    failure: E | None = None
    for attempt in tries:
        try:
            return operation()
        except kind as error:
            failure = error
            if not attempt.is_last:
                on_failure(error, attempt)
    assert failure, "there is at least one attempt"
    raise failure


def through_skips(train: Callable[[], T]) -> T:
    """Trains, and begins again at each step to skip; the run limits their number, see `training.guard`."""
    found = ""
    while True:
        try:
            return train()
        except SkipError as error:
            if error.message == found:  # found again, so it was not skipped: this would never end
                raise
            found = error.message
