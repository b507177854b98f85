"""Which MLflow a run is tracked in: the one that its recipe names, or the one that Kubeflow itself logs to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs import links
from baton.components.shared.runs.documents.training import Tracking
from baton.components.shared.runs.run import Run
from baton.components.shared.store.storage import Storage

PARENT = "mlflow.parentRunId"
"""Tag by which MLflow shows a run below another one of the same experiment."""

KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag that says what an experiment is; without it MLflow's page guesses, see `links.TRAINING` too."""

ACCESS = ("MLFLOW_WORKSPACE", "MLFLOW_TRACKING_AUTH")
"""Variables beside the address by which Kubeflow tells a pod how to reach its MLflow; those of a Secret aside."""


@dataclass(frozen=True)
class Server:
    """An MLflow server or database."""

    uri: str
    experiment_id: str | None = None
    """Kubeflow's experiment, where the server is Kubeflow's own."""
    stage_run_id: str | None = None
    """Kubeflow's tracking run of this stage, which is read and never written."""

    def experiment(self, client: Any, recipe: Recipe, storage: Storage) -> str:
        """Returns the number of a recipe's experiment: Kubeflow's own, or one by its name, made where there is none.

        Beside a local database the experiment's artifacts go into the store.
        """
        if self.experiment_id and recipe.tracking.experiment is None:
            return self.experiment_id
        name = recipe.tracking.experiment or recipe.name
        if existing := client.get_experiment_by_name(name):
            return str(existing.experiment_id)
        local = self.uri.startswith("sqlite:") and storage.is_local
        location = storage.uri("mlflow") if local else None
        # Only here: of one that is there already, its people have decided what it is.
        return str(client.create_experiment(name, artifact_location=location, tags=KIND))

    def parent(self, client: Any, experiment_id: str | None) -> dict[str, str]:
        """Returns the tag that shows a run of an experiment below that of the Kubeflow run; none where it cannot be.

        That is the parent of the stage's run: what lies below the stage's run Kubeflow ends together with the stage.
        """
        if self.stage_run_id is None or experiment_id != self.experiment_id:
            return {}
        tags = client.get_run(self.stage_run_id).data.tags
        return {PARENT: tags[PARENT]} if PARENT in tags else {}


def of(recipe: Recipe) -> Server | None:
    """Returns the server that a new run is tracked in, None where it is not tracked."""
    if recipe.tracking.mlflow:
        return Server(recipe.tracking.mlflow)
    variables = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID")
    uri, experiment_id, stage_run_id = (os.environ.get(name) for name in variables)
    # All three, in a Kubeflow pod: an address alone may stand in anybody's shell.
    if links.kubeflow_run() and uri and experiment_id and stage_run_id:
        return Server(uri, experiment_id, stage_run_id)
    return None


def address(run: Run, recipe: Recipe) -> str | None:
    """Returns the address of the server that a run is tracked in; of one that is not, that which a new run would be."""
    if tracking := run.read(Tracking):
        return tracking.mlflow
    server = of(recipe)
    return server.uri if server else None
