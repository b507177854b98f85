"""Live metrics of a chunk, in its first rank: what `Trainer` logs, and how fast training goes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from baton.checkpoint.store import Checkpoint
from baton.models.loading import count_parameters
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.run import Run
from baton.tracking import tracker
from baton.train.context import TrainContext
from baton.train.metrics.sinks import ObservedChunk, Sink, open_sinks
from baton.train.protocol import ChunkTrainer

PEAK_FLOPS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense 16-bit operations per second by whole words of the device's name, from the makers' data sheets."""
_NAMES = re.compile(rf"(?<![^\W_])(?:{'|'.join(sorted(PEAK_FLOPS, key=len, reverse=True))})(?![^\W_])")


def peak_flops(device: str) -> float | None:
    """Returns a device's dense 16-bit operations per second; None for an unknown device."""
    match = _NAMES.search(device)  # the name of a slice (MIG) does not tell its share
    return PEAK_FLOPS[match[0]] if match and "MIG" not in device else None


class LiveReport(TrainerCallback):
    """Sends the trainer's logs, and its pace, to wherever metrics are kept."""

    stateless = True

    def __init__(self, meter: Meter, sinks: Sequence[Sink]) -> None:
        self._meter, self._sinks = meter, sinks

    def on_train_begin(
        self, args: object, state: TrainerState, control: object, model: PreTrainedModel, **_: object
    ) -> None:
        self._meter.begin(state.global_step, model)

    def on_log(self, args: object, state: TrainerState, control: object, logs: dict[str, float], **_: object) -> None:
        if "train_runtime" in logs:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if "loss" in logs:
            numbers |= self._meter.read(state.global_step)
        self.tell(numbers, state.global_step)

    def tell(self, numbers: Mapping[str, float], step: int) -> None:
        for sink in self._sinks:
            sink.log(numbers, step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class Meter:
    """Measures how fast training in so many processes goes between two logs."""

    def __init__(self, run: Run, recipe: Recipe, processes: int = 1) -> None:
        tokens = run.need(TokenizedRows)
        self._rows = recipe.training.batch_size
        self._tokens = self._rows * tokens.tokens / max(tokens.train, 1)
        self._processes = processes
        self._parameters = 0
        self._last = (0, 0.0)

    def begin(self, step: int, model: PreTrainedModel) -> None:
        self._parameters = count_parameters(model.parameters())
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
            if peak := peak_flops(torch.cuda.get_device_name()):
                rates["mfu"] = 6 * self._parameters * rates["tokens_per_second"] / (peak * self._processes)
        return rates


def attach_observers(
    context: TrainContext,
    trainer: ChunkTrainer,
    folder: str,
    live: Callable[[], dict[str, float]],
    newest: Callable[[], Checkpoint | None],
) -> LiveReport:
    """Reports a trainer's metrics, and samples of its model if the recipe asks for them.

    `live` returns the chunk's progress, by the names in `sinks.LIVE_GAUGES`.
    """
    run, recipe, weights = context.run, context.recipe, list(trainer.model.parameters())
    observed = ObservedChunk(
        run=run,
        recipe=recipe,
        index=context.index,
        folder=folder,
        live=live,
        seconds=context.clock.split,
        newest=newest,
        params=tracker.resolved_params(
            recipe,
            context.plan,
            run.need(TokenizedRows),
            world_size=context.ranks.size,
            parameters=count_parameters(weights),
            trainable=count_parameters(weight for weight in weights if weight.requires_grad),
        ),
    )
    report = LiveReport(Meter(run, recipe, context.ranks.size), open_sinks(observed))
    trainer.add_callback(report)
    if recipe.evaluation.write_every:
        from baton.train.metrics.samples import SampleCallback

        tick = trainer.watchdog.tick
        trainer.add_callback(SampleCallback(run, recipe, trainer.processing_class, report.tell, tick))
    return report
