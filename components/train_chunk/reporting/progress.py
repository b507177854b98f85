"""The step a chunk is at, written to the store every few seconds: it tells what a killed process had not saved."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.training import Progress
from baton.components.shared.runs.run import Run, now

logger = logging.getLogger("baton")

EVERY = 10.0
"""Seconds between two notes."""


@dataclass(frozen=True)
class Lost:
    """Work that the process before this one had done and not saved.

    Attributes:
        steps: Steps trained after the checkpoint that is restored now.
        seconds: About how long they took.
    """

    steps: int = 0
    seconds: float = 0.0


class ProgressNotes:
    """Notes the step a chunk is at, beside training.

    Args:
        run: The run.
        chunk: Number of the chunk.
    """

    def __init__(self, run: Run, chunk: int) -> None:
        self.run = run
        self.chunk = chunk
        self.step = 0
        self._from_step = 0
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
