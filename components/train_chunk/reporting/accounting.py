"""Accounts for the cost of a run, and for what one attempt at a chunk adds to it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypedDict

import psutil

from baton.components.shared.runs.documents.training import Work
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.reporting.clock import Clock
from baton.components.train_chunk.reporting.progress import Lost, ProgressNotes


class Figures(TypedDict):
    """An attempt's cost, as its record has it."""

    lost_steps: int
    lost_seconds: float
    save_stalls: list[float]
    peak_bytes: int


@dataclass
class Accounting:
    """The costs of one attempt.

    Attributes:
        clock: Its clock.
        progress: The step it is at, noted in the store.
        before: What the run had cost at the checkpoint that is restored.
        lost: What the process before had trained and not saved.
        restarts: Processes of the run that were lost and followed by another one in their pod.
        stalls: Seconds for which training stood still for each checkpoint.
    """

    clock: Clock
    progress: ProgressNotes
    before: Work
    lost: Lost
    restarts: int = 0
    stalls: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, context: TrainContext, before: Work | None, start_step: int) -> Accounting:
        """Returns the costs of an attempt that begins.

        Args:
            context: Its chunk.
            before: What the run had cost at the checkpoint that is restored, None where there is none.
            start_step: The step that it begins at.
        """
        progress = ProgressNotes(context.run, context.index)
        return cls(context.clock, progress, before or Work(), progress.lost(start_step), context.run.num_restarts())

    def work(self, trained_for: float) -> Work:
        """Returns what the run has cost, all its chunks together.

        Args:
            trained_for: Seconds for which this attempt has trained.
        """
        started = self.before.started or self.clock.began
        trained = self.before.trained_seconds + trained_for
        return Work(
            started=started,
            trained_seconds=trained,
            goodput=trained / max(time.time() - started, 1e-9),
            lost_steps=self.before.lost_steps + self.lost.steps,
            lost_seconds=self.before.lost_seconds + self.lost.seconds,
            restarts=self.restarts,
        )

    def figures(self) -> Figures:
        """Returns what this attempt cost, for its record."""
        return {
            "lost_steps": self.lost.steps,
            "lost_seconds": self.lost.seconds,
            "save_stalls": self.stalls,
            "peak_bytes": _peak_bytes(),
        }


def _peak_bytes() -> int:
    """Returns the most memory this process has held at once."""
    info = psutil.Process().memory_info()
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return int(info.rss)
