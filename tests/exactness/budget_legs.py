"""Chunks of runs with a budget, whose clock counts steps."""

from __future__ import annotations

SECONDS = 100.0
"""Time of a step."""


def chunk(run_uri: str, index: int, begins_at: float, kill_at: str | None = None) -> None:
    """Runs a chunk that has begun so many seconds ago."""
    import legs

    from baton import events
    from baton.train.chunk import run_chunk
    from baton.train.context import Clock

    steps: list[events.Event] = []

    class Counting(Clock):
        def total(self) -> float:
            return begins_at + SECONDS * len(steps)

    events.hear(lambda event: steps.append(event) if isinstance(event, events.Step) else None)
    if kill_at:
        legs._kill_at(kill_at)
    run_chunk(run_uri, index, clock=Counting())
