"""A trainer whose guard watches every other step or so, and which times each: both sides of a comparison in one run.

Two runs in turn differ by more than a guard costs: by the place of their memory, and by what else the machine does in
those seconds.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

RECORD = "BATON_BENCH_STEPS"
"""Variable with the file that the first process writes: for each step whether it was watched, when it began by the
clock, and by the seconds of its thread."""


class Alternating:
    """Watches the first and the last of each four steps, so that what drifts is on both sides alike."""

    _times: list[tuple[bool, float, float]] | None = None

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        trainer: Any = self
        if self._times is None:
            self._times, self._watching = [], trainer.guard
        watched = is_watched(trainer.state.global_step + 1)
        trainer.guard = self._watching if watched else None
        self._times.append((watched, time.perf_counter(), time.thread_time()))
        return super().training_step(*arguments, **options)  # type: ignore[misc]

    def train(self, *arguments: Any, **options: Any) -> Any:
        done = super().train(*arguments, **options)  # type: ignore[misc]
        path = os.environ.get(RECORD)
        if path and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
            with open(path, "w", encoding="utf-8") as file:
                json.dump(self._times, file)
        return done


def is_watched(step: int) -> bool:
    """Tells whether a step, from 1, is watched."""
    return step % 4 in (0, 1)
