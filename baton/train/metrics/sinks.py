"""Metric sinks of a chunk, each opened if the recipe asks for it.

JSON Lines and TensorBoard's files are uploaded when the chunk ends. MLflow goes by a process beside the chunk.
Prometheus asks at `/metrics` while it runs: a push would leave the last figures in a gateway for ever.
Weights & Biases is another sink.
"""

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

    import wandb
    from prometheus_client import Metric
    from torch.utils.tensorboard import SummaryWriter


logger = logging.getLogger("baton")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The chunk whose metrics are sent.

    Attributes:
        run: The training run.
        recipe: Its recipe.
        index: Number of the chunk.
        folder: A local folder for files.
        live: Returns how far the chunk is, by the names in `LIVE_GAUGES`.
        seconds: Returns the seconds of the chunk by phase.
        newest: Returns the newest checkpoint, None before there is one.
        found_out: Parameters of the run that its recipe does not say, see `baton.tracking.tracker`.
    """

    run: Run
    recipe: Recipe
    index: int
    folder: str
    live: Callable[[], dict[str, float]]
    seconds: Callable[[], dict[str, float]]
    newest: Callable[[], Checkpoint | None] = lambda: None
    found_out: Mapping[str, str] = field(default_factory=dict)


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


class Lines:
    """Writes a chunk's metrics to a local file, which is uploaded when the chunk ends.

    Args:
        path: The local file.
        run: The run below which it ends.
        name: Its name there.
    """

    def __init__(self, path: str, run: Run, name: str) -> None:
        self._path, self._run, self._name = path, run, name
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the chunk

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Writes the values of a step."""
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")

    def close(self) -> None:
        """Uploads the file."""
        self._file.close()
        try:
            self._run.storage.upload(self._path, self._run.path(self._name))
        except BatonError as error:  # a copy of what the checkpoint holds, not the run
            logger.warning("%s was not kept: %s", self._name, error)


def open_jsonl(source: Source) -> Lines | None:
    """Returns the file of a chunk's attempt, None where the recipe wants none."""
    if not source.recipe.tracking.jsonl:
        return None
    # Each attempt at a chunk has its own file: one that was killed and comes late overwrites nobody's.
    name = f"metrics/chunk-{source.index:03d}-{uuid.uuid4().hex[:6]}.jsonl"
    return Lines(os.path.join(source.folder, "metrics.jsonl"), source.run, name)


class TrackingRun:
    """Reports to the tracking run, and says of its model which checkpoint it is.

    Args:
        tracker: Sends it.
        source: The chunk.
    """

    def __init__(self, tracker: Tracker, source: Source) -> None:
        self._tracker, self._source = tracker, source

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queues the values of a step."""
        self._tracker.log(numbers, step)

    def close(self) -> None:
        """Sends the rest."""
        if checkpoint := self._source.newest():
            self._tracker.tag_model({"baton.step": str(checkpoint.step), "baton.digest": checkpoint.digest})
        self._tracker.close()


def open_mlflow(source: Source) -> TrackingRun:
    """Returns the tracking run's queue, which drops what it gets where the recipe turns tracking off."""
    tracker = Tracker(source.run, recipe=source.recipe, trains=True, params=source.found_out)
    return TrackingRun(tracker, source)


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
"""What the trainer logs → metric and what it says."""

LIVE_GAUGES = {
    "step": ("baton_step", "Optimizer steps trained."),
    "target_step": ("baton_target_step", "Step that this chunk trains to."),
    "checkpoint_step": ("baton_checkpoint_step", "Step of the newest checkpoint in the store."),
    "unsaved_seconds": ("baton_unsaved_seconds", "Time since training began or the last checkpoint arrived."),
    "goodput": ("baton_goodput_ratio", "Share of the time since the run's first chunk began that went into training."),
    "lost_steps": ("baton_lost_steps", "Steps of this run that were trained, not saved, and trained again."),
    "restarts": ("baton_process_restarts", "Processes of this run that were lost and started again in their pod."),
}
"""What is asked for at the time of a scrape → metric and what it says."""

PHASE_GAUGE = ("baton_chunk_phase_seconds", "Where this chunk's time went: start, import, fetch, build, train, save, …")


class Telemetry:
    """Serves figures at a port, in a thread beside training.

    Args:
        port: TCP port, on every address of the machine: a pod is asked from outside. One that is taken is a
            warning.
        labels: Label → value on every metric.
        live: Returns figures by the names in `LIVE_GAUGES`.
        seconds: Returns seconds by phase.
    """

    def __init__(
        self,
        port: int,
        labels: dict[str, str],
        live: Callable[[], dict[str, float]],
        seconds: Callable[[], dict[str, float]],
    ) -> None:
        # Here, because only those pay for its import who ask for it.
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = labels
        self._live = live
        self._seconds = seconds
        self._logged: dict[str, float] = {}
        self._server: WSGIServer | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, registry=registry)
        except OSError as error:
            events.warn(f"metrics are not served at port {port}: {error}")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Takes what the trainer has logged; the newest value of each counts."""
        self._logged.update({name: value for name, value in numbers.items() if name in LOGGED_GAUGES})

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as they are now, for a scrape."""
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
        """Returns nothing: there are no figures yet when the registry asks."""
        return []

    def close(self) -> None:
        """Frees the port, in half a second beside what else there is to do."""
        if self._server:
            threading.Thread(target=self._end, args=(self._server,), daemon=True).start()

    @staticmethod
    def _end(server: WSGIServer) -> None:
        server.shutdown()
        server.server_close()


def open_prometheus(source: Source) -> Telemetry | None:
    """Serves the figures of a chunk at the recipe's port, if it names one."""
    port = source.recipe.tracking.prometheus_port
    if port is None:
        return None
    labels = {"run": source.run.name, "recipe": source.recipe.name, "chunk": str(source.index)}
    return Telemetry(port, labels, source.live, source.seconds)


class EventFiles:
    """Writes a chunk's event files.

    Args:
        writer: Writes them.
        folder: Where it does.
        run: Below which they end.
    """

    def __init__(self, writer: SummaryWriter, folder: str, run: Run) -> None:
        self._writer, self._folder, self._run = writer, folder, run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Writes the values of a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name.replace("eval_", "eval/", 1), value, step)

    def close(self) -> None:
        """Uploads the files."""
        self._writer.close()
        keep_files(self._run, self._folder, "tensorboard")


def open_tensorboard(source: Source) -> EventFiles | None:
    """Returns the event files of a chunk, None where the recipe wants none.

    Raises:
        UserError: TensorBoard is not installed.
    """
    if not source.recipe.tracking.tensorboard:
        return None
    extras.require_packages("tracking.tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folder = os.path.join(source.folder, "tensorboard")
    return EventFiles(SummaryWriter(folder), folder, source.run)


class Project:
    """Reports to a run of a project.

    Args:
        tracked: The run there, which the chunks of a training run share.
        run: The training run, below which its folder is put where it has no network.
    """

    def __init__(self, tracked: wandb.Run, run: Run) -> None:
        self._tracked, self._run = tracked, run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queues the values of a step."""
        self._tracked.log(dict(numbers), step=step)

    def close(self) -> None:
        """Sends the rest."""
        self._tracked.finish()
        if self._tracked.offline:  # `wandb sync` sends it later; this machine's folder ends with the chunk
            import wandb

            wandb.teardown()  # until then its own process may hold the last records back
            folder = os.path.dirname(self._tracked.dir)
            keep_files(self._run, folder, f"wandb/{os.path.basename(folder)}")


def open_wandb(source: Source) -> Project | None:
    """Returns the run of the recipe's project, None where it names none.

    Raises:
        UserError: the package is not installed.
    """
    project = source.recipe.tracking.wandb
    if project is None:
        return None
    extras.require_packages("tracking.wandb", "wandb")
    import wandb

    name = source.run.name
    tracked = wandb.init(project=project, id=name, name=name, resume="allow", dir=source.folder)
    return Project(tracked, source.run)


SINKS = (open_prometheus, open_mlflow, open_wandb, open_tensorboard, open_jsonl)


def open_sinks(source: Source) -> list[Sink]:
    """Returns the sinks that a recipe asks for.

    Raises:
        UserError: the package of one of them is not installed.
    """
    return [sink for open_sink in SINKS if (sink := open_sink(source))]
