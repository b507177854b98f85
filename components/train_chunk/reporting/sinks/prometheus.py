"""Serves a train-chunk's metrics to Prometheus: the newest figures at `/metrics`, asked for while it runs.

A pod that pushes would leave its last figures in a gateway for ever; one that is asked is gone when it ends, which
is what an alert on a running chunk needs. What a run was stays in its store and in MLflow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from baton.components.shared.core import events
from baton.components.train_chunk.reporting.sinks.base import Source

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import Metric


LOGGED = {
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

LIVE = {
    "step": ("baton_step", "Optimizer steps trained."),
    "target_step": ("baton_target_step", "Step that this chunk trains to."),
    "checkpoint_step": ("baton_checkpoint_step", "Step of the newest checkpoint in the store."),
    "unsaved_seconds": ("baton_unsaved_seconds", "Time since training began or the last checkpoint arrived."),
    "goodput": ("baton_goodput_ratio", "Share of the time since the run's first chunk began that went into training."),
    "lost_steps": ("baton_lost_steps", "Steps of this run that were trained, not saved, and trained again."),
    "restarts": ("baton_process_restarts", "Processes of this run that were lost and started again in their pod."),
}
"""What is asked for at the time of a scrape → metric and what it says."""

PHASE = ("baton_chunk_phase_seconds", "Where this chunk's time went: start, import, fetch, build, train, save, …")


class Telemetry:
    """Serves figures at a port, in a thread beside training.

    Args:
        port: TCP port, on every address of the machine: a pod is asked from outside. One that is taken is a
            warning.
        labels: Label → value on every metric.
        live: Returns figures by the names in `LIVE`.
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
        self._logged.update({name: value for name, value in numbers.items() if name in LOGGED})

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as they are now, for a scrape."""
        from prometheus_client.core import GaugeMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        for known, figures in ((LOGGED, dict(self._logged)), (LIVE, self._live())):
            for name, value in figures.items():
                gauge = GaugeMetricFamily(*known[name], labels=names)
                gauge.add_metric(values, value)
                yield gauge
        phases = GaugeMetricFamily(*PHASE, labels=[*names, "phase"])
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


def open_sink(source: Source) -> Telemetry | None:
    """Serves the figures of a chunk at the recipe's port, if it names one."""
    port = source.recipe.tracking.prometheus_port
    if port is None:
        return None
    labels = {"run": source.run.name, "recipe": source.recipe.name, "chunk": str(source.index)}
    return Telemetry(port, labels, source.live, source.seconds)
