"""What a run on Kubeflow has left running in MLflow, found by the id of the Kubeflow run.

The address is in the compiled pipeline: no access to the store is needed. Kubeflow's own MLflow is none of it: there
Kubeflow ends what lies below its run itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from baton.components.shared.core import wire
from baton.components.shared.runs import tracking
from baton.pipelines.kubeflow.api import Run
from baton.pipelines.kubeflow.endpoint import Client

ENDS: dict[str, tracking.Ended] = {"failed": "FAILED", "canceled": "KILLED"}
"""State of a run that could not end its tracking run by itself → how MLflow calls that."""


@dataclass(frozen=True)
class _Place:
    """Where a recipe of the pipeline is tracked."""

    mlflow: str
    page: str | None
    experiment: str


def close(client: Client, run: Run, state: str) -> list[str]:
    """Ends what a run has left running in MLflow, where it has failed or was cancelled.

    Args:
        client: What `endpoint.connect` returned.
        run: The run.
        state: Its state, as `run_view.outcome` calls it.

    Returns:
        What there is to say of it, in lines.
    """
    if state not in ENDS:
        return []
    places = set(_places(client.specification(run)))
    said = []
    for uri, page in {(place.mlflow, place.page) for place in places}:
        experiments = [place.experiment for place in places if place.mlflow == uri]
        said += _closed(uri, page, experiments, run.run_id, ENDS[state])
    return said


def _closed(uri: str, page: str | None, experiments: list[str], run_id: str, status: tracking.Ended) -> list[str]:
    """Ends the runs by the address that people have, or else by that which pods have."""
    for reached in filter(None, (page, uri)):
        try:
            ended = tracking.close_left(reached, experiments, run_id, status)
        except Exception:
            continue
        return [f"MLflow: run {name} is {status.lower()}" for name in ended]
    return [f"MLflow at {uri} cannot be reached from here: what the run left running there is so until its next start"]


def _places(node: object) -> Iterator[_Place]:
    """Yields where the recipes are tracked that a compiled pipeline hands to its stages."""
    if isinstance(node, list):
        for entry in node:
            yield from _places(entry)
    if not isinstance(node, dict):
        return
    for key, entry in node.items():
        if key == "recipe" and isinstance(entry, dict):
            text = entry.get("runtimeValue", {}).get("constant")
            yield from _of_recipe(json.loads(wire.received(text))) if text else ()
        yield from _places(entry)


def _of_recipe(recipe: dict[str, object]) -> Iterator[_Place]:
    section = recipe.get("tracking")
    if isinstance(section, dict) and (uri := section.get("mlflow")):
        experiment = section.get("experiment") or recipe["name"]
        yield _Place(str(uri), section.get("mlflow_page"), str(experiment))
