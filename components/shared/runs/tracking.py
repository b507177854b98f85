"""MLflow: one tracking run for a training run, whichever processes report to it."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, Literal

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs import links, servers
from baton.components.shared.runs.documents.sweeps import TrialNote
from baton.components.shared.runs.documents.training import ForkNote, Tracking
from baton.components.shared.runs.run import Run
from baton.components.shared.runs.servers import Server

logger = logging.getLogger("baton")

Ended = Literal["FINISHED", "FAILED", "KILLED"]
"""How MLflow calls the end of a run."""

TIMEOUT = "5"
"""Seconds a call to a tracking server may take, and it is tried twice: training matters more."""


def start(run: Run, recipe: Recipe) -> None:
    """Creates a new run's tracking run, and sets a resumed run's running again; a server out of reach is a warning."""
    server, tracking = servers.of(recipe), run.read(Tracking)
    if tracking:
        _resume(run, tracking, server)
        return
    if server is None:
        return
    try:
        from mlflow.entities import Param

        client = connect(server.uri)
        number = server.experiment(client, recipe, run.storage)
        tags = {"baton.run": run.name, "baton.run_uri": run.uri, **links.tags()}
        # The parent that Baton knows goes before Kubeflow's run: the run forked from, the sweep of a trial.
        tags |= server.parent(client, number) | _of_fork(run, server.uri, number) | _of_trial(run)
        tracked = client.create_run(number, run_name=run.name, tags=tags)
        settings = _flat(recipe.model_dump(mode="json", exclude={"store", "resources"}))
        params = [Param(path, str(value)[:500]) for path, value in settings]
        for first in range(0, len(params), 100):  # as many as a server takes at once
            client.log_batch(tracked.info.run_id, params=params[first : first + 100])
    except Exception as error:
        logger.warning("tracking at %s is off for this run: %s", server.uri, error)
        return
    # A crash before this leaves a tracking run that nothing is logged to; the next attempt makes another.
    run.write(Tracking(mlflow=server.uri, run_id=tracked.info.run_id, experiment_id=number))


def _resume(run: Run, tracking: Tracking, server: Server | None) -> None:
    """Sets the tracking run of a resumed run running again, with links to the Kubeflow run that resumes it."""
    try:
        client = connect(tracking.mlflow)
        reopen(client, tracking.run_id)
        tags = links.tags()
        if server and server.uri == tracking.mlflow:
            number = tracking.experiment_id
            tags |= server.parent(client, number) | _of_fork(run, server.uri, number) | _of_trial(run)
        for name, value in tags.items():
            client.set_tag(tracking.run_id, name, value)
    except Exception as error:
        logger.warning("tracking at %s does not know that this run resumes: %s", tracking.mlflow, error)


def _of_fork(run: Run, uri: str, number: str | None) -> dict[str, str]:
    """Returns what names a fork's parent; where that is tracked in the same experiment, the fork is shown below it."""
    fork = run.read(ForkNote)
    if fork is None:
        return {}
    tags = {"baton.parent": fork.parent, "baton.parent_step": str(fork.step)}
    theirs = Run.open(fork.parent).read(Tracking)
    if theirs and (theirs.mlflow, theirs.experiment_id) == (uri, number):
        tags[servers.PARENT] = theirs.run_id
    return tags


def _of_trial(run: Run) -> dict[str, str]:
    """Returns what shows a trial below its sweep."""
    trial = run.read(TrialNote)
    return {servers.PARENT: trial.tracking, "baton.sweep": trial.sweep} if trial and trial.tracking else {}


def log_metrics(run: Run, metrics: dict[str, float], step: int) -> None:
    """Logs metrics to the tracking run, if there is one; a server out of reach is a warning."""
    with Tracker(run, system_metrics=False) as tracker:
        tracker.log(metrics, step)


def tag(run: Run, tags: dict[str, str]) -> None:
    """Sets tags on the tracking run, if there is one; a server out of reach is a warning."""
    tracking = run.read(Tracking)
    if tracking is None or not tags:
        return
    try:
        client = connect(tracking.mlflow)
        for name, value in tags.items():
            client.set_tag(tracking.run_id, name, value)
    except Exception as error:
        logger.warning("tracking at %s has no tags of this run: %s", tracking.mlflow, error)


def finish(run: Run, report_path: str | None) -> None:
    """Marks the tracking run finished and keeps the report with it."""
    close(run, "FINISHED", report_path)


def close(run: Run, status: Ended, report_path: str | None = None) -> None:
    """Ends the tracking run, if there is one, and keeps the report with it; a server out of reach is a warning."""
    tracking = run.read(Tracking)
    if tracking is None:
        return
    try:
        client = connect(tracking.mlflow)
        if report_path:
            client.log_artifact(tracking.run_id, report_path)
        client.set_terminated(tracking.run_id, status)
    except Exception as error:
        logger.warning("tracking at %s was not told that this run is %s: %s", tracking.mlflow, status.lower(), error)


def close_left(uri: str, experiments: Iterable[str], kubeflow_run: str, status: Ended) -> list[str]:
    """Ends what a Kubeflow run that has ended left running: its runs, its sweep, its trials.

    A run that another Kubeflow run has resumed since is that one's, and stays as it is.

    Args:
        uri: Address of the server.
        experiments: Names of the experiments to look through.
        kubeflow_run: Id of the Kubeflow run.
        status: How it ended.

    Returns:
        Names of the tracking runs that were ended.

    Raises:
        Exception: MLflow's own, where the server cannot be had.
    """
    client = connect(uri, retries="0")
    existing = [client.get_experiment_by_name(name) for name in sorted(set(experiments))]
    numbers = [found.experiment_id for found in existing if found]
    if not numbers:
        return []
    wanted = f"tags.`kubeflow.run_id` = '{kubeflow_run}' and attributes.status = 'RUNNING'"
    left = client.search_runs(numbers, wanted, max_results=1000)
    for tracked in left:
        client.set_terminated(tracked.info.run_id, status)
    return [str(tracked.info.run_name) for tracked in left]


def reopen(client: Any, run_id: str) -> None:
    """Sets a tracking run running again."""
    if client.get_run(run_id).info.status != "RUNNING":
        client.update_run(run_id, "RUNNING")


class Tracker:
    """Sends metrics from a separate process, so that neither import nor server holds training up.

    Args:
        run: The training run.
        system_metrics: Also log CPU, memory, disk, network and GPU use of this machine.
    """

    def __init__(self, run: Run, *, system_metrics: bool) -> None:
        self._process: subprocess.Popen[str] | None = None
        if run.read(Tracking):
            command = [sys.executable, "-m", "baton.components.shared.runs.tracking", run.uri, str(int(system_metrics))]
            # In a session of its own: Ctrl-C ends training, and what was handed over is sent still; it ends with its
            # input.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Hands metrics of a step over; returns at once."""
        if self._process and self._process.stdin:
            try:
                # With the time of the step: it may be sent much later.
                self._process.stdin.write(json.dumps([metrics, step, int(time.time() * 1000)]) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._process = None  # it has said why

    def close(self, timeout: float = 30.0) -> None:
        """Waits until what was handed over is sent, at most `timeout` seconds."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.close()
            self._process.wait(timeout)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            logger.warning("tracking did not finish in %.0f s and is abandoned", timeout)
            self._process.kill()


def serve(run_uri: str, system_metrics: bool) -> None:
    """Logs the `[metrics, step, milliseconds]` lines of standard input; with `system_metrics` they are a chunk's."""
    # Training comes first.
    os.nice(10)
    run = Run.open(run_uri)
    tracking = run.need(Tracking)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    try:
        client = connect(tracking.mlflow)
        if system_metrics:
            reopen(client, tracking.run_id)  # a chunk may train again after its run was called failed or killed
        monitor = _monitor(tracking.run_id) if system_metrics else None
        logged: dict[str, int] | None = None
        while (batch := _drain(lines)) != [None]:
            if logged is None:  # not before: what a chunk that was killed had handed over may be on its way still
                logged = _last_steps(client, tracking.run_id) if system_metrics else {}
            entities = [entity for line in batch if line for entity in _entities(*json.loads(line))]
            entities = [entity for entity in entities if entity.step > logged.get(entity.key, -1)]
            for first in range(0, len(entities), 1000):
                client.log_batch(tracking.run_id, metrics=entities[first : first + 1000])
            if None in batch:
                break
        if monitor:
            monitor.finish()
    except Exception as error:
        logger.warning("tracking at %s stopped: %s", tracking.mlflow, error)


def _read(lines: queue.Queue[str | None]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def _drain(lines: queue.Queue[str | None]) -> list[str | None]:
    """Returns what is there, waiting for the first; None stands for the end."""
    batch = [lines.get()]
    while not lines.empty():
        batch.append(lines.get())
    return batch


def _last_steps(client: Any, run_id: str) -> dict[str, int]:
    """Returns the last step that each metric of a tracking run has.

    A chunk trains the steps behind its checkpoint again, to the same bits, and MLflow would keep both values of each.
    """
    return {metric.key: metric.step for metric in client.get_run(run_id).data.to_proto().metrics}


def _monitor(run_id: str) -> Any:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id, sampling_interval=5, resume_logging=True)
    monitor.start()
    return monitor


def _entities(metrics: dict[str, float], step: int, milliseconds: int) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(name, float(value), milliseconds, step) for name, value in metrics.items()]


def connect(uri: str, timeout: str = TIMEOUT, retries: str = "1") -> Any:
    """Returns a client of a tracking server or database that gives up soon."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", timeout)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", retries)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    import mlflow

    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(uri)


def _flat(document: dict[str, object], path: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in document.items():
        name = f"{path}.{key}".lstrip(".")
        pairs.extend(_flat(value, name) if isinstance(value, dict) and value else [(name, value)])
    return pairs


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    serve(sys.argv[1], sys.argv[2] == "1")
