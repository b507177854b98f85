"""Cost of an attempt, and the step it is at: written every few seconds, so a kill shows lost work."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

import psutil

from baton.errors import BatonError
from baton.runs.documents import Progress, RunCost
from baton.runs.run import Run, now
from baton.train.context import Clock, TrainContext

logger = logging.getLogger("baton")

EVERY = 10.0
"""Seconds between two notes."""


@dataclass(frozen=True)
class Lost:
    """Work that the process before this one had done after the checkpoint that is restored now; seconds are about."""

    steps: int = 0
    seconds: float = 0.0


class ProgressNotes:
    """Notes the step a chunk is at, beside training."""

    def __init__(self, run: Run, chunk: int) -> None:
        self.run, self.chunk = run, chunk
        self.step = self._from_step = 0
        self._began = time.monotonic()
        self._ended = threading.Event()

    def lost(self, restored_step: int) -> Lost:
        """Returns what the process before had done beyond the checkpoint that is restored now.

        Accurate to the ten seconds between two notes. What was reported of a process that has begun to train is not
        reported again, see `start`.
        """
        note = self.run.read(Progress)
        if note is None or note.step <= restored_step:
            return Lost()
        steps = note.step - restored_step
        return Lost(steps, steps * note.seconds_per_step)

    def start(self, step: int) -> None:
        """Begins to take notes after the step restored; what keeps them from the store is no reason to stop."""
        self.step = self._from_step = step
        self._began = time.monotonic()
        threading.Thread(target=self._work, name="baton-progress", daemon=True).start()

    def end(self) -> None:
        """Takes no more notes."""
        self._ended.set()

    def _work(self) -> None:
        noted = self._from_step
        try:
            before = self.run.read(Progress)
            if before and before.step > noted:  # what the process before had not saved is reported once
                self.run.write(before.model_copy(update={"step": noted}))
        except BatonError as error:
            logger.warning("progress was not noted: %s", error.message)
        while not self._ended.wait(EVERY):
            if self.step == noted:
                continue
            noted = self.step
            pace = (time.monotonic() - self._began) / (noted - self._from_step)
            try:
                self.run.write(Progress(step=noted, chunk=self.chunk, seconds_per_step=pace, at=now()))
            except BatonError as error:
                logger.warning("progress was not noted: %s", error.message)


@dataclass
class Accounting:
    """The costs of one attempt."""

    clock: Clock
    progress: ProgressNotes
    before: RunCost
    """The run's at the checkpoint that is restored."""
    lost: Lost
    restarts: int = 0
    """Processes of the run that were lost and followed by another one in their pod."""
    stalls: list[float] = field(default_factory=list)
    """Seconds for which training stood still for each checkpoint."""

    @classmethod
    def of(cls, context: TrainContext, before: RunCost | None, start_step: int) -> Accounting:
        """Returns the costs of an attempt that begins at a step, None before where that is the run's first."""
        progress = ProgressNotes(context.run, context.index)
        return cls(context.clock, progress, before or RunCost(), progress.lost(start_step), context.run.num_restarts())

    def work(self, trained_for: float) -> RunCost:
        """Returns what the run has cost, all its chunks and so many seconds of this attempt together."""
        started = self.before.started or self.clock.began
        trained = self.before.trained_seconds + trained_for
        return RunCost(
            started=started,
            trained_seconds=trained,
            goodput=trained / max(time.time() - started, 1e-9),
            lost_steps=self.before.lost_steps + self.lost.steps,
            lost_seconds=self.before.lost_seconds + self.lost.seconds,
            restarts=self.restarts,
        )

    def figures(self) -> dict[str, object]:
        """Returns what this attempt cost, for its record."""
        return {
            "lost_steps": self.lost.steps,
            "lost_seconds": self.lost.seconds,
            "save_stalls": self.stalls,
            "peak_bytes": peak_bytes(),
        }


def peak_bytes() -> int:
    """Returns the most memory this process has held at once."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)
