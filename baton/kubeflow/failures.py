"""Runs that ended without their own record: why they failed, their page, and their MLflow runs ended.

The observer writes this (`status`, `--wait`, `cancel`, `retry`), with access to the store. A stage's own record wins.
MLflow runs are found by the Kubeflow run's id; Kubeflow's own MLflow needs none of it.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import BatonError
from baton.kubeflow import run_status
from baton.kubeflow.connection import KubeflowClient, KubeflowRun
from baton.kubeflow.run_status import ENDED, OWN, UNKNOWN, WAITING, StageStatus
from baton.runs import ref
from baton.runs import run as failures
from baton.runs.outcomes import RunFailure
from baton.runs.run import now
from baton.tracking import tracking_run

PLACES = {  # end of a run → states of the stage that it ended at, the surest first
    "failed": ("FAILED", "CANCELED", UNKNOWN, "RUNNING", "PENDING", WAITING),
    "canceled": ("CANCELED", "RUNNING", "PENDING", "FAILED", UNKNOWN, WAITING),
}
CANCELLED = "The run was cancelled."
UNSAID = "Its pod has left no message."


def record_failure(client: KubeflowClient, remote: KubeflowRun, stages: list[StageStatus], state: str) -> str | None:
    """Records why a run ended early, and writes its page; returns a line about it, or None."""
    if state not in PLACES or not stages:
        return None
    order = PLACES[state]
    stage = min(stages, key=lambda stage: order.index(stage.state) if stage.state in order else len(order))
    at = stage if stage.name != OWN else next((x for x in stages if x.state not in ENDED), stage)
    phase, name = at.name.rpartition(": ")[0], stage.name.rpartition(": ")[2]
    try:
        run = run_status.training_run(remote, client.specification(remote), phase)
        if run.storage.is_local and not os.path.isdir(run.storage.root):
            raise BatonError(f"{run.storage.root} is not a folder here.")
        failure = run.read(RunFailure)
        if failure and run_status.is_failure_of(failure, remote):
            return f"why it ended: {run.uri}/report.html"
        ends = [stage.ended for stage in stages if stage.ended]
        end = remote.finished_at or max(ends, default=None) or datetime.datetime.now(datetime.UTC)
        if run.recorded(end):
            return None  # it has been resumed since, by another run on Kubeflow
        return f"why it ended: {failures.record_failure(run.uri, _failure(stage, name, remote, state), anew=True)}"
    except (KeyError, ValueError):  # a sweep, a retraining, or no pipeline of ours
        return None
    except BatonError as error:
        return f"no page says why it ended, as its store cannot be used from here: {error.message}"


def _failure(stage: StageStatus, name: str, remote: KubeflowRun, state: str) -> RunFailure:
    again = f"`baton retry {remote.display_name}` resumes it."
    if state == "canceled":
        return RunFailure(stage=name, message=CANCELLED, remedy=again, is_cancelled=True, at=now())
    message, remedy = stage.message or UNSAID, stage.hint or again
    return RunFailure(stage=name, message=message, remedy=remedy, exit_code=stage.exit_code, at=now())


ENDS: dict[str, tracking_run.Ended] = {"failed": "FAILED", "canceled": "KILLED"}  # state of a run → MLflow's


@dataclass(frozen=True)
class _Place:
    mlflow: str
    page: str | None
    experiment: str


def end_mlflow_runs(client: KubeflowClient, run: KubeflowRun, state: str) -> list[str]:
    """Ends what a failed or cancelled run has left running in MLflow; returns lines about it."""
    if state not in ENDS:
        return []
    places = set(_places(client.specification(run)))
    lines = []
    for uri, page in {(place.mlflow, place.page) for place in places}:
        experiments = [place.experiment for place in places if place.mlflow == uri]
        lines += _closed(uri, page, experiments, run.run_id, ENDS[state])
    return lines


def _closed(uri: str, page: str | None, experiments: list[str], run_id: str, status: tracking_run.Ended) -> list[str]:
    """Ends the runs at the address for people, else at the one for pods."""
    for reached in filter(None, (page, uri)):
        try:
            ended = tracking_run.close_left(reached, experiments, run_id, status)
        except Exception:
            continue
        return [f"MLflow: run {name} is {status.lower()}" for name in ended]
    return [f"MLflow at {uri} cannot be reached from here: what the run left running there is so until its next start"]


def _places(node: object) -> Iterator[_Place]:
    """Yields where the recipes in a compiled pipeline are tracked."""
    if isinstance(node, list):
        for entry in node:
            yield from _places(entry)
    if not isinstance(node, dict):
        return
    for key, entry in node.items():
        if key == "recipe" and isinstance(entry, dict):
            text = entry.get("runtimeValue", {}).get("constant")
            yield from _of_recipe(json.loads(ref.decode_texts(text))) if text else ()
        yield from _places(entry)


def _of_recipe(recipe: dict[str, object]) -> Iterator[_Place]:
    section = recipe.get("tracking")
    if isinstance(section, dict) and (uri := section.get("mlflow")):
        experiment = section.get("experiment") or recipe["name"]
        yield _Place(str(uri), section.get("mlflow_page"), str(experiment))
