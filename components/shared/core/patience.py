"""Waits and retries: one loop for all that try again until something holds, answers, or patience is over.

for _ in attempts(60.0, pause=1.0):      # wait until something holds
    if is_gone():
        return

answer = insist(ask, AwayError, attempts(300.0, pause=1.0), lambda error, attempt: logger.warning("%s", error))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from baton.components.shared.core.errors import SkipError
from baton.components.shared.core.world import REAL, World

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Attempt:
    """One of several attempts.

    Attributes:
        number: Its number, from 1.
        pause: Seconds from its end to the next one.
        until: The `monotonic()` after which none begins.
        world: Whose clock that is.
    """

    number: int
    pause: float
    until: float
    world: World = REAL

    @property
    def is_last(self) -> bool:
        """Whether patience is over before the next one could begin; to be asked at the attempt's end."""
        return self.world.monotonic() + self.pause > self.until


def attempts(
    patience: float,
    *,
    pause: float,
    growth: float = 1.0,
    longest: float = float("inf"),
    jitter: float = 0.0,
    sleep: Callable[[float], object] | None = None,
    world: World = REAL,
) -> Iterator[Attempt]:
    """Yields attempts, at least one, with pauses between them, until patience is over.

    Args:
        patience: Seconds from now after which no further attempt begins.
        pause: Seconds between the first two attempts.
        growth: Factor by which the pause grows from one attempt to the next.
        longest: Most seconds between two attempts, jitter aside.
        jitter: Share by which a pause varies at random, so that many processes do not return at once.
        sleep: Waits between two attempts; may return early, such as `Event.wait`; the world's own where it is None.
        world: Whose time it is.
    """
    until, regular = world.monotonic() + patience, pause
    for number in itertools.count(1):
        share = world.uniform(1 - jitter, 1 + jitter) if jitter else 1.0
        attempt = Attempt(number, min(regular, longest) * share, until, world)
        yield attempt
        if attempt.is_last:
            return
        (sleep or world.sleep)(attempt.pause)
        regular = min(regular * growth, longest)


def insist(
    operation: Callable[[], T], kind: type[E], tries: Iterable[Attempt], on_failure: Callable[[E, Attempt], object]
) -> T:
    """Returns what an operation returns, once it succeeds.

    Args:
        operation: Is called once for each attempt.
        kind: The error after which another attempt makes sense; every other one is raised at once.
        tries: See `attempts`.
        on_failure: Called with each failure that another attempt follows, before the pause.

    Raises:
        E: the last attempt failed too.
    """
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
    """Returns what training comes to, begun again each time that it has found a step that its run is to skip.

    How often is up to the run, which counts the steps, see `training.guard`.

    Raises:
        SkipError: it has found the same one again.
    """
    found = ""
    while True:
        try:
            return train()
        except SkipError as error:
            if error.message == found:  # what was written down is not heeded: it would never end
                raise
            found = error.message
