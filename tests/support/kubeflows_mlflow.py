"""Kubeflow's own MLflow: runs as its plugin makes them, and the variables that it gives the pods of a stage."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import mlflow

KFP_RUN = "3f0c7f5e-0d2b-4f6f-9a3b-000000000001"


class KubeflowsMLflow:
    """An MLflow database with the experiment that Kubeflow logs to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kubeflows.db"
        self.uri = f"sqlite:///{self.path}"
        self.client = mlflow.MlflowClient(self.uri)
        artifacts = (folder / "kubeflows-artifacts").as_uri()
        self.experiment = self.client.create_experiment("KFP-Default", artifact_location=artifacts)

    def pipeline_run(self, kfp_run: str = KFP_RUN) -> str:
        """Makes the tracking run of a pipeline run."""
        made = self.client.create_run(self.experiment, run_name="mine", tags={"kfp.pipeline_run_id": kfp_run})
        return str(made.info.run_id)

    def stage(self, root: str, name: str = "data-split", kfp_run: str = KFP_RUN) -> dict[str, str]:
        """Makes the nested run of a stage, and returns the variables of its pod."""
        made = self.client.create_run(self.experiment, run_name=name, tags={"mlflow.parentRunId": root})
        return {
            "KFP_RUN_ID": kfp_run,
            "MLFLOW_RUN_ID": made.info.run_id,
            "MLFLOW_TRACKING_URI": self.uri,
            "MLFLOW_EXPERIMENT_ID": self.experiment,
        }

    def rows(self, *runs: str) -> dict[str, list[tuple[object, ...]]]:
        """Returns all that the database holds of some runs, by table."""
        found = {}
        with sqlite3.connect(self.path) as database:
            tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
            for table in tables:
                rows = database.execute(f'select * from "{table}"').fetchall()
                found[table] = sorted((row for row in rows if set(row) & set(runs)), key=repr)
        return found

    def count(self) -> int:
        """Returns how many runs there are."""
        return len(self.client.search_runs([e.experiment_id for e in self.client.search_experiments()]))
