"""Live metrics of a chunk, in its first rank: sinks of what `Trainer` logs and of its pace, and sample texts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from baton import events
from baton.checkpoint.store import Checkpoint
from baton.errors import BatonError
from baton.models import generate, metrics, rng
from baton.models.loading import count_parameters
from baton.models.prompts import held_out_prompts
from baton.recipe import extras
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.run import Run
from baton.tracking import tracker
from baton.train import imports
from baton.train.context import TrainContext
from baton.train.protocol import ChunkTrainer

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import Metric

logger = logging.getLogger("baton")


@dataclass(frozen=True, kw_only=True)
class ObservedChunk:
    """The chunk whose metrics are sent."""

    run: Run
    recipe: Recipe
    index: int
    folder: str
    live: Callable[[], dict[str, float]]  # returns the chunk's progress, by the names in `LIVE_GAUGES`
    seconds: Callable[[], dict[str, float]]
    newest: Callable[[], Checkpoint | None] = lambda: None
    # Parameters of the run that its recipe lacks, see `baton.tracking.tracker`.
    params: Mapping[str, str] = field(default_factory=dict)


def keep_files(run: Run, folder: str, name: str) -> None:
    """Uploads the files of a local folder, at any depth, to a name below the run; one that fails is left out."""
    for place, _, files in os.walk(folder):
        below = os.path.normpath(os.path.join(name, os.path.relpath(place, folder)))
        for file in files:
            try:
                run.storage.upload(os.path.join(place, file), run.path(f"{below}/{file}"))
            except Exception as error:  # a picture of the run, not the run
                logger.warning("%s of the metrics was not kept: %s", file, error)


class Sink(Protocol):
    """Takes the metrics of a chunk; steps run on across chunks."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Takes the values of a step, without keeping training waiting."""

    def close(self) -> None:
        """Sends the rest."""


class JsonLines:
    """A JSON object for each logged step, in a local file that is uploaded below the run when the chunk ends."""

    def __init__(self, chunk: ObservedChunk) -> None:
        self._run, self._path = chunk.run, os.path.join(chunk.folder, "metrics.jsonl")
        # Each attempt at a chunk has its own file: a killed one that is late overwrites no other's.
        self._name = f"metrics/chunk-{chunk.index:03d}-{uuid.uuid4().hex[:6]}.jsonl"
        self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the chunk

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")

    def close(self) -> None:
        self._file.close()
        try:
            self._run.storage.upload(self._path, self._run.path(self._name))
        except BatonError as error:  # a copy of what the checkpoint holds, not the run
            logger.warning("%s was not kept: %s", self._name, error)


class MlflowSink:
    """Reports to the tracking run by a second process, and tags the model with its checkpoint."""

    def __init__(self, chunk: ObservedChunk) -> None:
        self._newest = chunk.newest
        self._tracker = tracker.Tracker(chunk.run, recipe=chunk.recipe, trains=True, params=chunk.params)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._tracker.log(numbers, step)

    def close(self) -> None:
        if checkpoint := self._newest():
            self._tracker.tag_model({"baton.step": str(checkpoint.step), "baton.digest": checkpoint.digest})
        self._tracker.close()


# Name in the trainer's log → metric and its help.
LOGGED_GAUGES = {
    "loss": ("baton_loss", "Training loss at the newest logged step."),
    "eval_loss": ("baton_eval_loss", "Loss on the held-out rows at the newest evaluation."),
    "learning_rate": ("baton_learning_rate", "Learning rate at the newest logged step."),
    "grad_norm": ("baton_grad_norm", "Norm of the gradient at the newest logged step."),
    "samples_per_second": ("baton_samples_per_second", "Rows trained per second."),
    "tokens_per_second": ("baton_tokens_per_second", "Tokens trained per second, rows taken to be of average length."),
    "mfu": ("baton_model_flops_utilization_ratio", "Share of the device's peak that the model's operations use."),
    "gpu_memory_bytes": ("baton_gpu_memory_bytes", "Most memory allocated on the GPU."),
}

# Figure at the time of a scrape → metric and its help.
LIVE_GAUGES = {
    "step": ("baton_step", "Optimizer steps trained."),
    "target_step": ("baton_target_step", "Step that this chunk trains to."),
    "checkpoint_step": ("baton_checkpoint_step", "Step of the newest checkpoint in the store."),
    "unsaved_seconds": ("baton_unsaved_seconds", "Time since training began or the last checkpoint arrived."),
    "goodput": ("baton_goodput_ratio", "Share of the time since the run's first chunk began that went into training."),
    "lost_steps": ("baton_lost_steps", "Steps of this run that were trained, not saved, and trained again."),
    "restarts": ("baton_process_restarts", "Processes of this run that were lost and started again in their pod."),
    "budget_spent": ("baton_budget_spent", "Cost of the run so far, in the unit of its limit."),
    "budget_predicted": ("baton_budget_predicted", "Cost of the whole run at its pace, in the unit of its limit."),
}
BUDGET = ("budget_spent", "budget_predicted")
"""Live figures that are logged as well."""

PHASE_GAUGE = ("baton_chunk_phase_seconds", "Time of this chunk by phase: start, import, fetch, build, train, save, …")


class PrometheusServer:
    """Serves figures at a port, in a thread: a push would keep the last ones in a gateway."""

    def __init__(self, chunk: ObservedChunk, port: int) -> None:
        # Here, because only those pay for its import who ask for it.
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = {"run": chunk.run.name, "recipe": chunk.recipe.name, "chunk": str(chunk.index)}
        self._live, self._seconds = chunk.live, chunk.seconds
        self._logged: dict[str, float] = {}
        self._server: WSGIServer | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            # On every address of the machine: a pod is asked from outside.
            self._server, _ = start_http_server(port, registry=registry)
        except OSError as error:
            events.warn(f"metrics are not served at port {port}: {error}")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._logged.update({name: value for name, value in numbers.items() if name in LOGGED_GAUGES})

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        for known, figures in ((LOGGED_GAUGES, dict(self._logged)), (LIVE_GAUGES, self._live())):
            for name, value in figures.items():
                gauge = GaugeMetricFamily(*known[name], labels=names)
                gauge.add_metric(values, value)
                yield gauge
        phases = GaugeMetricFamily(*PHASE_GAUGE, labels=[*names, "phase"])
        for phase, seconds in self._seconds().items():
            phases.add_metric([*values, phase], seconds)
        yield phases

    def describe(self) -> list[Metric]:
        return []  # no figures yet when the registry asks

    def close(self) -> None:
        if self._server:  # freeing the port takes half a second
            threading.Thread(target=self._end, args=(self._server,), daemon=True).start()

    @staticmethod
    def _end(server: WSGIServer) -> None:
        server.shutdown()
        server.server_close()


class TensorBoardFiles:
    """Event files of TensorBoard, uploaded to `tensorboard/` below the run when the chunk ends."""

    def __init__(self, chunk: ObservedChunk) -> None:
        extras.require_packages("tracking.tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._run, self._folder = chunk.run, os.path.join(chunk.folder, "tensorboard")
        self._writer = SummaryWriter(self._folder)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name.replace("eval_", "eval/", 1), value, step)

    def close(self) -> None:
        self._writer.close()
        keep_files(self._run, self._folder, "tensorboard")


class WandbRun:
    """Reports to a run of Weights & Biases, which the chunks of a training run share."""

    def __init__(self, chunk: ObservedChunk, project: str) -> None:
        extras.require_packages("tracking.wandb", "wandb")
        import wandb

        self._run, name = chunk.run, chunk.run.name
        self._tracked = wandb.init(project=project, id=name, name=name, resume="allow", dir=chunk.folder)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._tracked.log(dict(numbers), step=step)

    def close(self) -> None:
        self._tracked.finish()
        if self._tracked.offline:  # `wandb sync` sends it later; this machine's folder ends with the chunk
            import wandb

            wandb.teardown()  # until then its own process may hold the last records back
            folder = os.path.dirname(self._tracked.dir)
            keep_files(self._run, folder, f"wandb/{os.path.basename(folder)}")


def open_sinks(chunk: ObservedChunk) -> list[Sink]:
    """Returns the recipe's sinks; raises `UserError` if the package of one is not installed."""
    tracking = chunk.recipe.tracking
    sinks: list[Sink] = []
    if (port := tracking.prometheus_port) is not None:
        sinks.append(PrometheusServer(chunk, port))
    sinks.append(MlflowSink(chunk))
    if tracking.wandb is not None:
        sinks.append(WandbRun(chunk, tracking.wandb))
    if tracking.tensorboard:
        sinks.append(TensorBoardFiles(chunk))
    if tracking.jsonl:
        sinks.append(JsonLines(chunk))
    return sinks


# Dense 16-bit operations per second by whole words of the device's name, from the makers' data sheets.
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
_NAMES = re.compile(rf"(?<![^\W_])(?:{'|'.join(sorted(PEAK_FLOPS, key=len, reverse=True))})(?![^\W_])")


def peak_flops(device: str) -> float | None:
    """Returns a device's dense 16-bit operations per second; None for an unknown device."""
    match = _NAMES.search(device)  # the name of a slice (MIG) does not tell its share
    return PEAK_FLOPS[match[0]] if match and "MIG" not in device else None


class LiveReport(TrainerCallback):
    """Sends the trainer's logs, and its pace, to wherever metrics are kept."""

    stateless = True

    def __init__(self, meter: Meter, sinks: Sequence[Sink], live: Callable[[], dict[str, float]]) -> None:
        self._meter, self._sinks, self._live = meter, sinks, live

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
            numbers |= {name: value for name, value in self._live().items() if name in BUDGET}
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


class Sample(TypedDict):
    """A held-out prompt, the data's answer, and the model's."""

    prompt: str
    reference: str
    written: str


class SampleCallback(TrainerCallback):
    """Generates for held-out prompts every few steps and measures it, as the last evaluation does."""

    stateless = True

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        tell: Callable[[dict[str, float], int], None],
        tick: Callable[[], None],
    ) -> None:
        self._run, self._recipe, self._tokenizer, self._tell, self._tick = run, recipe, tokenizer, tell, tick
        self._every = recipe.evaluation.write_every or 0
        self._prompts = held_out_prompts(run, recipe, tokenizer, recipe.evaluation.samples)
        self._batch_size = recipe.evaluation_batch_size
        with rng.undisturbed():
            self._judge = metrics.Judge(recipe.evaluation, self._prompts, self._batch_size)

    def on_step_end(
        self, args: object, state: TrainerState, control: object, model: PreTrainedModel, **_: object
    ) -> None:
        if not self._prompts or state.global_step % self._every:
            return
        was_training = model.training
        model.eval()
        try:
            # No trace in training: tokens come from generators of their own, and metrics or functions that draw from
            # those of training draw from a copy. The other ranks wait meanwhile, which `tick` tells the watchdog.
            with rng.undisturbed(), _any_kernel():
                written = generate.write_all(
                    model,
                    self._tokenizer,
                    [prompt for prompt, _ in self._prompts],
                    max_new_tokens=self._recipe.evaluation.max_new_tokens,
                    max_length=self._recipe.data.max_length,
                    batch_size=self._batch_size,
                    temperature=self._recipe.evaluation.temperature,
                    top_p=self._recipe.evaluation.top_p,
                    seed=self._recipe.seed,
                    progress=lambda *_: self._tick(),
                )
                judged = self._judge.judge(written).figures
        finally:
            model.train(was_training)
        samples: list[Sample] = [
            {"prompt": prompt, "reference": reference, "written": text}
            for (prompt, reference), text in zip(self._prompts, written, strict=True)
        ]
        self._run.put(f"samples/step-{state.global_step:08d}.json", {"step": state.global_step, "samples": samples})
        self._tell(matches(samples) | _logged(judged), state.global_step)


@contextlib.contextmanager
def _any_kernel() -> Iterator[None]:
    """Allows kernels whose result varies: samples change no bit of training, and CUDA has no other sum for `top_p`."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    imports.use_deterministic(False)
    try:
        yield
    finally:
        imports.use_deterministic(deterministic)


def matches(samples: list[Sample]) -> dict[str, float]:
    """Returns the shares of texts that equal the reference, and whose number equals its number."""
    written, references = [sample["written"] for sample in samples], [sample["reference"] for sample in samples]
    # A share over no row is None and left out: perhaps no sample has a reference, or none with a number.
    return _logged(
        metrics.exact_match(written, references).figures | metrics.numeric_match(written, references).figures
    )


def _logged(measured: dict[str, metrics.Figure]) -> dict[str, float]:
    return {f"written_{name}": value for name, value in metrics.figure_values(measured).items() if value is not None}


def attach_observers(
    context: TrainContext,
    trainer: ChunkTrainer,
    folder: str,
    live: Callable[[], dict[str, float]],
    newest: Callable[[], Checkpoint | None],
) -> LiveReport:
    """Reports a trainer's metrics, and samples of its model if the recipe asks for them.

    `live` returns the chunk's progress, by the names in `LIVE_GAUGES`.
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
    report = LiveReport(Meter(run, recipe, context.ranks.size), open_sinks(observed), live)
    trainer.add_callback(report)
    if recipe.evaluation.write_every:
        tick = trainer.watchdog.tick
        trainer.add_callback(SampleCallback(run, recipe, trainer.processing_class, report.tell, tick))
    return report
