"""Live metrics of a training process, to MLflow."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from components.shared.runs import Run
from components.shared.tracking import Tracker


class LiveReport(TrainerCallback):
    """Sends what `Trainer` logs to the tracking run; steps run on across chunks."""

    stateless = True

    def __init__(self, run: Run) -> None:
        self._tracker = Tracker(run, system_metrics=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Queues the values of a step."""
        if logs and "train_runtime" not in logs:
            numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            self._tracker.log(numbers, state.global_step)

    def close(self) -> None:
        """Sends the rest."""
        self._tracker.close()
