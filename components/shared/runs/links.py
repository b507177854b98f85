"""Links to a run: in the store, in MLflow, in Kubeflow."""

from __future__ import annotations

import os

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.training import Tracking
from baton.components.shared.runs.run import Run

KUBEFLOW_RUN = "KFP_RUN_ID"
"""Variable with the id of the Kubeflow run that a pod belongs to; the compiled pipeline takes it from a label."""

TRAINING = "workflowType=machine_learning"
"""By which MLflow's pages show training, and not applications: they have two faces, and remember the last one."""

KUBEFLOW_PAGE = "KF_PIPELINES_UI_ENDPOINT"
"""Variable with the address of the Kubeflow Pipelines page, as kfp itself calls it."""


def kubeflow_run() -> str | None:
    """Returns the id of the Kubeflow run that this process belongs to, or None."""
    return os.environ.get(KUBEFLOW_RUN) or None


def kubeflow_url() -> str | None:
    """Returns where the Kubeflow run of this process is shown, or None where that is not known."""
    page, run_id = os.environ.get(KUBEFLOW_PAGE), kubeflow_run()
    return f"{page.rstrip('/')}/#/runs/details/{run_id}" if page and run_id else None


def mlflow_url(run: Run, recipe: Recipe) -> str | None:
    """Returns where the tracking run of a training run is shown, or None where it has no page."""
    tracking = run.read(Tracking)
    if tracking is None or tracking.experiment_id is None:
        return None
    page = recipe.tracking.mlflow_page or tracking.mlflow
    if not page.startswith(("http://", "https://")):
        return None
    return f"{page.rstrip('/')}/#/experiments/{tracking.experiment_id}/runs/{tracking.run_id}?{TRAINING}"


def tags() -> dict[str, str]:
    """Returns what leads from a tracking run to the Kubeflow run of this process."""
    present = {"kubeflow.run_id": kubeflow_run(), "kubeflow.url": kubeflow_url()}
    if url := present["kubeflow.url"]:
        present["mlflow.note.content"] = f"[Kubeflow run]({url})"
    return {name: value for name, value in present.items() if value}
