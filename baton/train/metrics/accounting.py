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
    """Work of the process before beyond the checkpoint that is restored now; the seconds are an estimate."""

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
        """Returns the work lost beyond the checkpoint restored now, to the ten seconds between two notes."""
        note = self.run.read(Progress)
        if note is None or note.step <= restored_step:
            return Lost()
        steps = note.step - restored_step
        return Lost(steps, steps * note.seconds_per_step)

    def start(self, step: int) -> None:
        """Begins to take notes after the step restored; a store that takes none is no reason to stop."""
        self.step = self._from_step = step
        self._began = time.monotonic()
        threading.Thread(target=self._work, name="baton-progress", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        noted = self._from_step
        try:
            before = self.run.read(Progress)
            if before and before.step > noted:  # lost steps are reported once, by the first process that trains again
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
    """The run's cost at the checkpoint that is restored."""
    lost: Lost
    restarts: int = 0
    """Processes of the run that were lost and replaced in their pod."""
    stalls: list[float] = field(default_factory=list)
    """Seconds that training stood still for each checkpoint."""

    @classmethod
    def of(cls, context: TrainContext, before: RunCost | None, start_step: int) -> Accounting:
        progress = ProgressNotes(context.run, context.index)
        return cls(context.clock, progress, before or RunCost(), progress.lost(start_step), context.run.num_restarts())

    def work(self, trained_for: float) -> RunCost:
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
