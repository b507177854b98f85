"""Live metrics of a training process, to MLflow, and to TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from components.shared.errors import UserError
from components.shared.recipe import Recipe
from components.shared.run_documents.data import Tokens
from components.shared.runs import Run
from components.shared.tracking import Tracker
from components.train_chunk.reporting.telemetry import Telemetry

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("baton")

PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense 16-bit operations per second by part of the device's name, from the makers' data sheets."""


class LiveReport(TrainerCallback):
    """Sends what `Trainer` logs, and how fast it goes, to wherever metrics are kept; steps run on across chunks.

    Args:
        run: The training run.
        recipe: Its recipe.
        folder: A local folder for event files.
    """

    stateless = True

    def __init__(self, run: Run, recipe: Recipe, folder: str) -> None:
        self._run = run
        self._tracker = Tracker(run, system_metrics=True)
        self._folder = os.path.join(folder, "tensorboard")
        self._board = _board(self._folder) if recipe.tracking.tensorboard else None
        self._wandb = _wandb(run, recipe, folder) if recipe.tracking.wandb else None
        self._meter = Meter(run, recipe)
        self._recipe = recipe
        self._telemetry: Telemetry | None = None

    def expose(self, index: int, live: Callable[[], dict[str, float]], seconds: Callable[[], dict[str, float]]) -> None:
        """Serves the figures of a chunk to Prometheus, where asked for; see `Telemetry`."""
        if port := self._recipe.tracking.prometheus_port:
            labels = {"run": self._run.name, "recipe": self._recipe.name, "chunk": str(index)}
            self._telemetry = Telemetry(port, labels, live, seconds)

    def on_train_begin(
        self, args: object, state: TrainerState, control: object, model: PreTrainedModel, **_: object
    ) -> None:
        """Begins to measure."""
        self._meter.begin(state.global_step, model)

    def on_log(self, args: object, state: TrainerState, control: object, logs: dict[str, float], **_: object) -> None:
        """Queues the values of a step."""
        if "train_runtime" in logs:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if "loss" in logs:
            numbers |= self._meter.read(state.global_step)
        self.tell(numbers, state.global_step)

    def tell(self, numbers: dict[str, float], step: int) -> None:
        """Queues values of a step that the trainer does not log."""
        self._tracker.log(numbers, step)
        if self._telemetry:
            self._telemetry.tell(numbers)
        if self._board:
            for name, value in numbers.items():
                self._board.add_scalar(name.replace("eval_", "eval/", 1), value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        """Sends the rest."""
        if self._telemetry:
            self._telemetry.close()
        self._tracker.close()
        if self._wandb:
            self._wandb.finish()
        if self._board:
            self._board.close()
            for name in os.listdir(self._folder):
                with contextlib.suppress(Exception):  # a picture of the run, not the run
                    self._run.storage.upload(os.path.join(self._folder, name), self._run.path(f"tensorboard/{name}"))


class Meter:
    """Measures how fast training goes between two logs.

    Args:
        run: The training run, whose tokens are known.
        recipe: Its recipe.
    """

    def __init__(self, run: Run, recipe: Recipe) -> None:
        tokens = run.need(Tokens)
        self._rows = recipe.training.batch_size
        self._tokens = self._rows * tokens.tokens / max(tokens.train, 1)
        self._processes = recipe.world_size
        self._parameters = 0
        self._last = (0, 0.0)

    def begin(self, step: int, model: PreTrainedModel) -> None:
        """Notes where training begins."""
        self._parameters = sum(value.numel() for value in model.parameters())
        self._last = (step, time.monotonic())

    def read(self, step: int) -> dict[str, float]:
        """Returns the rates since the last reading.

        `tokens_per_second` takes rows to be of average length; `mfu` is 6 operations per parameter and token (Chowdhery
        et al., arXiv:2204.02311, appendix B, without attention) over the peak of all devices, where that is known.
        """
        (before, since), now = self._last, time.monotonic()
        self._last = (step, now)
        rate = (step - before) / max(now - since, 1e-9)
        rates = {"samples_per_second": rate * self._rows, "tokens_per_second": rate * self._tokens}
        if torch.cuda.is_available():
            rates["gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated())
            name = torch.cuda.get_device_name()
            peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
            if peak:
                rates["mfu"] = 6 * self._parameters * rates["tokens_per_second"] / (peak * self._processes)
        return rates


def _board(folder: str) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "tracking.tensorboard: the package tensorboard is not installed.", remedy="Add it to the image."
        ) from None
    return SummaryWriter(folder)


def _wandb(run: Run, recipe: Recipe, folder: str) -> wandb.Run:
    try:
        import wandb
    except ImportError:
        raise UserError("tracking.wandb: the package wandb is not installed.", remedy="Add it to the image.") from None
    return wandb.init(project=recipe.tracking.wandb, id=run.name, name=run.name, resume="allow", dir=folder)
