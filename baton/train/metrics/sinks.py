"""Metric sinks of a chunk, each opened if the recipe asks for it."""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from baton import events
from baton.checkpoint.store import Checkpoint
from baton.errors import BatonError
from baton.recipe import extras
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.tracking.tracker import Tracker

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
    live: Callable[[], dict[str, float]]
    """Returns the chunk's progress, by the names in `LIVE_GAUGES`."""
    seconds: Callable[[], dict[str, float]]
    newest: Callable[[], Checkpoint | None] = lambda: None
    params: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the run that its recipe lacks, see `baton.tracking.tracker`."""


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
        # Each attempt at a chunk has its own file: one that was killed and comes late overwrites nobody's.
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
    """Reports to the tracking run by the process beside the chunk, and tags the model with its checkpoint."""

    def __init__(self, chunk: ObservedChunk) -> None:
        self._newest = chunk.newest
        self._tracker = Tracker(chunk.run, recipe=chunk.recipe, trains=True, params=chunk.params)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._tracker.log(numbers, step)

    def close(self) -> None:
        if checkpoint := self._newest():
            self._tracker.tag_model({"baton.step": str(checkpoint.step), "baton.digest": checkpoint.digest})
        self._tracker.close()


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
"""Name in the trainer's log → metric and its help."""

LIVE_GAUGES = {
    "step": ("baton_step", "Optimizer steps trained."),
    "target_step": ("baton_target_step", "Step that this chunk trains to."),
    "checkpoint_step": ("baton_checkpoint_step", "Step of the newest checkpoint in the store."),
    "unsaved_seconds": ("baton_unsaved_seconds", "Time since training began or the last checkpoint arrived."),
    "goodput": ("baton_goodput_ratio", "Share of the time since the run's first chunk began that went into training."),
    "lost_steps": ("baton_lost_steps", "Steps of this run that were trained, not saved, and trained again."),
    "restarts": ("baton_process_restarts", "Processes of this run that were lost and started again in their pod."),
}
"""Figure at the time of a scrape → metric and its help."""

PHASE_GAUGE = ("baton_chunk_phase_seconds", "Where this chunk's time went: start, import, fetch, build, train, save, …")


class PrometheusServer:
    """Serves figures at a port, in a thread beside training: a push would leave the last ones in a gateway."""

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
