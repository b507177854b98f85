"""The trained model as MLflow's logged model: pending while chunks train, ready once there is what can be used."""

from __future__ import annotations

from typing import Any

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.outcome import Evaluation, ExportedModel
from baton.components.shared.runs.mlflow.told import Model
from baton.components.shared.runs.run import Run

EXTERNAL = "mlflow.model.isExternal"
"""MLflow's tag of a model whose files are elsewhere."""


def of(run: Run, recipe: Recipe) -> Model:
    """Returns the model that a run's first chunk makes."""
    tags = {"baton.run": run.name, "baton.run_uri": run.uri}
    if recipe.model.base:
        tags["baton.base"] = recipe.model.base
    return Model(run.name, recipe.training.method, tags)


def newest(client: Any, run_id: str) -> Any:
    """Returns the logged model that has come out of a run last, None where there is none."""
    outputs = client.get_run(run_id).outputs
    found = outputs.model_outputs if outputs else []
    return client.get_logged_model(found[-1].model_id) if found else None


def has_no_files(model: Any) -> bool:
    """Tells whether a logged model can take files: it is not ready, or was called so without any."""
    return bool(model.status != "READY" or EXTERNAL in model.tags)


def end(client: Any, run: Run, run_id: str, status: str) -> None:
    """Ends the model of a run that has ended: an export has made it ready where MLflow has its files.

    Args:
        client: MLflow's client.
        run: The run.
        run_id: Its tracking run.
        status: How it ended, in MLflow's words.
    """
    if status != "FINISHED":
        fail(client, run_id)
        return
    model = newest(client, run_id)
    if model is None or model.status == "READY":
        return
    tags = {EXTERNAL: "true"}
    if exported := run.read(ExportedModel):
        tags["baton.model_uri"] = exported.model_uri
    evaluation = run.read(Evaluation)
    if evaluation and evaluation.gate:
        tags["baton.verdict"] = evaluation.gate.words
    client.set_logged_model_tags(model.model_id, tags)
    client.finalize_logged_model(model.model_id, "READY")


def fail(client: Any, run_id: str) -> None:
    """Calls the model of a run failed, unless it is ready."""
    model = newest(client, run_id)
    if model is not None and model.status != "READY":
        client.finalize_logged_model(model.model_id, "FAILED")


def resume(client: Any, run_id: str) -> None:
    """Sets the model of a run that goes on pending again, where it was called failed."""
    model = newest(client, run_id)
    if model is not None and model.status == "FAILED":
        client.finalize_logged_model(model.model_id, "PENDING")
