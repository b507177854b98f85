"""The MLflow server of a run, and links to the run in the store, MLflow and Kubeflow.

The recipe names the server; without one it is the server that Kubeflow itself logs to.
"""

import os
from dataclasses import dataclass
from typing import Any

from baton.recipe.recipe import Recipe
from baton.runs.documents import TrackingRun
from baton.runs.run import Run
from baton.store.storage import Storage

KUBEFLOW_RUN = "KFP_RUN_ID"  # variable with the id of a pod's Kubeflow run; the compiled pipeline takes it from a label
# Makes MLflow's pages show training, and not applications: they remember the last of the two.
TRAINING = "workflowType=machine_learning"
# Variable with the address of the Kubeflow Pipelines page, as kfp itself calls it.
KUBEFLOW_PAGE = "KF_PIPELINES_UI_ENDPOINT"


def kubeflow_run() -> str | None:
    """Returns the id of this process's Kubeflow run."""
    return os.environ.get(KUBEFLOW_RUN) or None


def mlflow_url(run: Run, recipe: Recipe) -> str | None:
    """Returns the page of a run's tracking run, if it has one."""
    tracking = run.read(TrackingRun)
    if tracking is None or tracking.experiment_id is None:
        return None
    page = recipe.tracking.mlflow_page or tracking.mlflow
    if not page.startswith(("http://", "https://")):
        return None
    return f"{page.rstrip('/')}/#/experiments/{tracking.experiment_id}/runs/{tracking.run_id}?{TRAINING}"


def kubeflow_tags() -> dict[str, str]:
    """Returns tags that link a tracking run to this process's Kubeflow run."""
    page, run_id = os.environ.get(KUBEFLOW_PAGE), kubeflow_run()
    if not run_id:
        return {}
    url = f"{page.rstrip('/')}/#/runs/details/{run_id}" if page else ""
    links = {"kubeflow.url": url, "mlflow.note.content": f"[Kubeflow run]({url})"} if url else {}
    return {"kubeflow.run_id": run_id, **links}


PARENT = "mlflow.parentRunId"  # tag by which MLflow shows a run below another one of the same experiment
# Tag with an experiment's kind, which MLflow's page would otherwise guess; see `TRAINING`.
KIND = {"mlflow.experimentKind": "custom_model_development"}
# Variables other than the address by which Kubeflow tells a pod how to reach its MLflow; a Secret's aside.
ACCESS = ("MLFLOW_WORKSPACE", "MLFLOW_TRACKING_AUTH")


@dataclass(frozen=True)
class Server:
    """An MLflow server or database."""

    uri: str
    experiment_id: str | None = None  # Kubeflow's experiment, where the server is Kubeflow's own
    stage_run_id: str | None = None  # Kubeflow's tracking run of this stage, which is read and never written

    def experiment(self, client: Any, recipe: Recipe, storage: Storage) -> str:
        """Returns the number of a recipe's experiment: Kubeflow's own, or one by its name, made if there is none."""
        if self.experiment_id and recipe.tracking.experiment is None:
            return self.experiment_id
        name = recipe.tracking.experiment or recipe.name
        if existing := client.get_experiment_by_name(name):
            return str(existing.experiment_id)
        # With a local database the experiment's artifacts go into the store.
        location = storage.uri("mlflow") if self.uri.startswith("sqlite:") and storage.is_local else None
        # Tagged only here: the kind of an existing experiment is its owners' decision.
        return str(client.create_experiment(name, artifact_location=location, tags=KIND))

    def parent(self, client: Any, experiment_id: str | None) -> dict[str, str]:
        """Returns the tag that shows a run of an experiment below the Kubeflow run's, if it can be."""
        if self.stage_run_id is None or experiment_id != self.experiment_id:
            return {}
        # Not below the stage's own run: Kubeflow ends runs there together with the stage.
        tags = client.get_run(self.stage_run_id).data.tags
        return {PARENT: tags[PARENT]} if PARENT in tags else {}


def server_of(recipe: Recipe) -> Server | None:
    """Returns the server for a new run, None if it is not tracked."""
    if recipe.tracking.mlflow:
        return Server(recipe.tracking.mlflow)
    variables = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID")
    uri, experiment_id, stage_run_id = (os.environ.get(name) for name in variables)
    # All three, in a Kubeflow pod: an address alone may be in anybody's shell.
    if kubeflow_run() and uri and experiment_id and stage_run_id:
        return Server(uri, experiment_id, stage_run_id)
    return None


def server_address(run: Run, recipe: Recipe) -> str | None:
    """Returns the address of a run's server; for an untracked run, that of the server for a new one."""
    if tracking := run.read(TrackingRun):
        return tracking.mlflow
    server = server_of(recipe)
    return server.uri if server else None
