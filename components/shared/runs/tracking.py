"""MLflow: one tracking run for a training run, whichever processes report to it.

A stage tells what it has to tell by MLflow's own client; metrics go by a process beside it, see `mlflow.tracker`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs import links, servers
from baton.components.shared.runs.documents.data import SplitCounts
from baton.components.shared.runs.documents.sweeps import TrialNote
from baton.components.shared.runs.documents.training import ForkNote, Tracking
from baton.components.shared.runs.mlflow import clients, datasets, models, parameters
from baton.components.shared.runs.mlflow.connection import connect, without_credentials
from baton.components.shared.runs.mlflow.tracker import Tracker, send_held
from baton.components.shared.runs.run import Run
from baton.components.shared.runs.servers import Server

__all__ = [
    "RECIPE",
    "Ended",
    "Tracker",
    "close",
    "close_left",
    "connect",
    "log_data",
    "log_metrics",
    "log_params",
    "log_texts",
    "start",
    "tag",
]

Ended = Literal["FINISHED", "FAILED", "KILLED"]
"""How MLflow calls the end of a run."""

AT_ONCE = 100
"""Parameters that a server takes in one request."""
RECIPE = "recipe.yaml"
"""Artifact with what the recipe sets."""


def start(run: Run, recipe: Recipe) -> None:
    """Creates a new run's tracking run, and sets a resumed run's running again; a server out of reach is a warning."""
    server, tracking = servers.of(recipe), run.read(Tracking)
    if tracking:
        _resume(run, tracking, server)
        return
    if server is None:
        return
    try:
        client = connect(server.uri)
        number = server.experiment(client, recipe, run.storage)
        tags = {"baton.run": run.name, "baton.run_uri": run.uri, **links.tags()}
        # The parent that Baton knows goes before Kubeflow's run: the run forked from, the sweep of a trial.
        tags |= server.parent(client, number) | _of_fork(run, server.uri, number) | _of_trial(run)
        tracked = client.create_run(number, run_name=run.name, tags=tags)
        log_params(client, tracked.info.run_id, parameters.chosen(recipe))
    except Exception as error:
        run.warn(f"tracking at {without_credentials(server.uri)} is off for this run: {error}")
        return
    # A crash before this leaves a tracking run that nothing is logged to; the next attempt makes another.
    run.write(Tracking(mlflow=server.uri, run_id=tracked.info.run_id, experiment_id=number))
    log_texts(run.warn, client, server.uri, tracked.info.run_id, {RECIPE: recipe_file.to_yaml(recipe, only_set=True)})


def log_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    """Logs parameters to a tracking run."""
    from mlflow.entities import Param

    entities = [Param(name, value) for name, value in params.items()]
    for first in range(0, len(entities), AT_ONCE):
        client.log_batch(run_id, params=entities[first : first + AT_ONCE])


def log_texts(warn: Callable[[str], None], client: Any, uri: str, run_id: str, texts: Mapping[str, str]) -> None:
    """Keeps texts as files among a tracking run's artifacts; a store of artifacts out of reach is a warning.

    It may be another than the server, with credentials that this process has not: the rest goes on without.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="baton-mlflow-") as folder:
            for name, text in texts.items():
                Path(folder, name).write_text(without_credentials(text), encoding="utf-8")
            client.log_artifacts(run_id, folder)
    except Exception as error:
        names = ", ".join(texts)
        warn(f"tracking at {without_credentials(uri)} does not keep {names}: {error}")


def _resume(run: Run, tracking: Tracking, server: Server | None) -> None:
    """Sets the tracking run of a resumed run running again, with links to the Kubeflow run that resumes it."""

    def tell(client: Any) -> None:
        reopen(client, tracking.run_id)
        models.resume(client, tracking.run_id)
        tags = links.tags()
        if server and server.uri == tracking.mlflow:
            number = tracking.experiment_id
            tags |= server.parent(client, number) | _of_fork(run, server.uri, number) | _of_trial(run)
        for name, value in tags.items():
            client.set_tag(tracking.run_id, name, value)

    _told(run, tracking, "does not know that this run resumes", tell)


def _told(run: Run, tracking: Tracking, otherwise: str, tell: Callable[[Any], None]) -> bool:
    """Tells a server something, and whether it has heard it; one out of reach is a warning."""
    try:
        tell(connect(tracking.mlflow))
    except Exception as error:
        run.warn(f"tracking at {without_credentials(tracking.mlflow)} {otherwise}: {error}")
        return False
    return True


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


def log_data(run: Run, recipe: Recipe) -> None:
    """Logs the run's rows as inputs of its tracking run, once; a server out of reach is a warning."""
    tracking, counts = run.read(Tracking), run.read(SplitCounts)
    if tracking is None or counts is None or tracking.datasets:
        return

    def tell(client: Any) -> None:
        client.log_inputs(tracking.run_id, datasets.inputs(recipe, counts))

    if _told(run, tracking, "has no data set of this run", tell):
        # Metrics are logged by these.
        sides = {side: list(key) for side, key in datasets.keys(recipe, counts).items()}
        run.write(tracking.model_copy(update={"datasets": sides}))


def log_metrics(run: Run, metrics: dict[str, float], step: int) -> None:
    """Logs metrics to the tracking run, if there is one; a server out of reach is a warning."""
    with Tracker(run) as tracker:
        tracker.log(metrics, step)


def tag(run: Run, tags: dict[str, str]) -> None:
    """Sets tags on the tracking run, if there is one; a server out of reach is a warning."""
    tracking = run.read(Tracking)
    if tracking is None or not tags:
        return

    try:
        clients.client(tracking.mlflow).tag(tracking.run_id, tags)
    except Exception as error:
        run.warn(f"tracking at {without_credentials(tracking.mlflow)} has no tags of this run: {error}")


def close(run: Run, status: Ended, texts: Mapping[str, str] | None = None) -> None:
    """Ends the tracking run, if there is one, and keeps files with it; a server out of reach is a warning.

    Args:
        run: The run.
        status: How it ended.
        texts: Name → content of files such as the report.
    """
    tracking = run.read(Tracking)
    if tracking is None:
        return

    def tell(client: Any) -> None:
        send_held(run)
        if texts:
            log_texts(run.warn, client, tracking.mlflow, tracking.run_id, texts)
        client.set_terminated(tracking.run_id, status)

    if _told(run, tracking, f"was not told that this run is {status.lower()}", tell):
        # A server before MLflow 3 has no models.
        _told(run, tracking, "does not know how this run's model is", lambda client: _end_model(client, run, status))


def _end_model(client: Any, run: Run, status: Ended) -> None:
    models.end(client, run, run.need(Tracking).run_id, status)


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
        models.fail(client, tracked.info.run_id)
    return [str(tracked.info.run_name) for tracked in left]


def reopen(client: Any, run_id: str) -> None:
    """Sets a tracking run running again."""
    if client.get_run(run_id).info.status != "RUNNING":
        client.update_run(run_id, "RUNNING")
