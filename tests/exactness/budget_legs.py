"""Chunks of runs with a budget, whose clock counts the times that it is read."""

from __future__ import annotations

import itertools

SECONDS = 100.0
"""What passes from one reading of the clock to the next."""


def chunk(run_uri: str, index: int, begins_at: float, kill_at: str | None = None) -> None:
    """Runs a chunk that has begun so many seconds ago."""
    import legs

    from baton.train.chunk import run_chunk
    from baton.train.context import Clock

    class Counting(Clock):
        def total(self) -> float:
            return begins_at + SECONDS * next(readings)

    readings = itertools.count()
    if kill_at:
        legs._kill_at(kill_at)
    run_chunk(run_uri, index, clock=Counting())
