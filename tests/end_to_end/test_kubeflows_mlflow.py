"""A whole run in pods that have Kubeflow's own MLflow: every stage reports below the pipeline run, none to its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.runs.documents import TrackingRun
from baton.runs.outcomes import RegistryEntry
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.support.kubeflows_mlflow import KubeflowsMLflow

RECIPE = Path(__file__).parents[1] / "recipes/scratch.yaml"
BATON = str(Path(sys.executable).parent / "baton")


@pytest.mark.slow
def test_no_stage_writes_to_its_own_run(tmp_path: Path) -> None:
    kubeflow = KubeflowsMLflow(tmp_path)
    root = kubeflow.pipeline_run()
    variables = kubeflow.stage(root)
    stage = variables["MLFLOW_RUN_ID"]
    before = kubeflow.rows(stage), kubeflow.client.get_run(root).to_dictionary()
    settings = {
        "tracking.mlflow": "null",
        "training.epochs": "null",
        "training.max_steps": "4",
        "chunks.count": "2",
        "export.formats": "[safetensors, mlflow]",
        "evaluation.gate": '{perplexity: "<= baseline"}',
    }
    command = [BATON, "run", str(RECIPE), "--run", "mine", "--store", str(tmp_path / "store")]
    command += [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    run = Run(Storage(str(tmp_path / "store")), "mine")
    own = kubeflow.client.get_run(run.need(TrackingRun).run_id)
    assert (own.info.status, own.data.tags["mlflow.parentRunId"]) == ("FINISHED", root)
    assert own.data.tags["baton.verdict"] == "accepted"
    assert {"loss", "eval_loss"} <= set(own.data.metrics)
    logged = RegistryEntry.model_validate(run.require(RegistryEntry.NAME))
    assert logged.model_id
    assert kubeflow.client.get_logged_model(logged.model_id).source_run_id == own.info.run_id
    assert kubeflow.count() == 3
    assert (kubeflow.rows(stage), kubeflow.client.get_run(root).to_dictionary()) == before
    assert not kubeflow.client.list_artifacts(stage)
