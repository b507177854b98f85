"""A run in MLflow as its pages show it: by a real server, from its first stage to its last."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from baton.recipe import load
from baton.runs.documents import SplitCounts, TrackingRun
from baton.runs.outcomes import ExportedModel
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.tracking import tracking_run
from baton.tracking.tracker import Tracker

pytestmark = pytest.mark.slow

ROWS = [{"prompt": "a", "completion": "b"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow's server on a database and a folder."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", uri.rpartition(":")[2]]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([*command, "--artifacts-destination", str(folder / "artifacts")], stderr=log)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.5)
        yield uri
    finally:
        process.terminate()
        process.wait(30)


def _run(tmp_path: Path, uri: str, name: str, **settings: Any) -> Run:
    document = {
        "name": name,
        "model": {"from_scratch": {}, "tokenizer": {"train": {}}},
        "data": {"source": "builtin:stdlib-docs"},
        "tracking": {"mlflow": uri, **settings},
    }
    run = Run(Storage(str(tmp_path / "store")), name)
    run.create(load.validate(document, origin="test"))
    tracking_run.start(run, run.recipe())
    counts = {
        "rows": 12,
        "train": 9,
        "eval": 3,
        "test": 0,
        "digest": "5" * 64,
        "columns": tracking_run.dataset_columns(ROWS),
    }
    run.put(SplitCounts.NAME, counts)
    tracking_run.log_data(run, run.recipe())
    return run


def _train(run: Run, steps: range, **figures: float) -> None:
    with Tracker(run, trains=True, params={"plan.steps": "8"}) as tracker:
        for step in steps:
            tracker.log({"loss": 9.0 - step, "learning_rate": 0.5, **figures}, step)
        tracker.tag_model({"baton.step": str(steps[-1])})


@pytest.fixture(params=["server", "database"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("server") if request.param == "server" else f"sqlite:///{tmp_path}/mlflow.db"


def test_a_run_from_its_first_stage_to_its_last(uri: str, tmp_path: Path) -> None:
    run = _run(tmp_path, uri, "whole")
    client = mlflow.MlflowClient(uri)
    _train(run, range(1, 5))
    _train(run, range(3, 9), eval_loss=0.25)  # restored at step 2: two steps are trained again
    tracking_run.log_metrics(run, {"final_after_loss": 0.25, "final_before_loss": 9.0}, 8)
    run.write(ExportedModel(model_uri="/there/export"))
    tracking_run.close(run, "FINISHED", {"report.html": "<p>report</p>", "proof.json": "{}"})

    own = run.need(TrackingRun)
    found = client.get_run(own.run_id)
    assert found.info.status == "FINISHED"
    experiment = client.get_experiment(own.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert found.data.params == {
        "seed": "0",
        "data.source": "builtin:stdlib-docs",
        "training.method": "sft",
        "training.batch_size": "8",
        "training.learning_rate": "2e-05",
        "plan.steps": "8",
    }
    losses = client.get_metric_history(own.run_id, "loss")
    assert [(metric.step, metric.value) for metric in losses] == [(step, 9.0 - step) for step in range(1, 9)]
    sides = {entry.tags[0].value: entry.dataset for entry in found.inputs.dataset_inputs}
    assert {side: json.loads(each.profile)["num_rows"] for side, each in sides.items()} == {"train": 9, "eval": 3}
    assert [column["name"] for column in json.loads(sides["train"].schema)["mlflow_colspec"]] == list(ROWS[0])
    files = {file.path for file in client.list_artifacts(own.run_id)}
    assert files == {"recipe.yaml", "report.html", "proof.json"}

    (output,) = found.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert (model.name, model.model_type, model.status, model.source_run_id) == ("whole", "sft", "READY", own.run_id)
    assert model.params == found.data.params
    assert (model.tags["baton.step"], model.tags["baton.model_uri"]) == ("8", "/there/export")
    linked = {metric.key: (metric.dataset_name, metric.dataset_digest) for metric in model.metrics}
    train, held_out = ("stdlib-docs-train", "5" * 12), ("stdlib-docs-eval", "5" * 12)
    assert linked == {"loss": train, "eval_loss": held_out, "final_after_loss": held_out}


def test_an_experiment_that_is_there_stays_as_it_is(server: str, tmp_path: Path) -> None:
    client = mlflow.MlflowClient(server)
    number = client.create_experiment("ours", tags={"mine": "1"})
    run = _run(tmp_path, server, "in-ours", experiment="ours")
    assert run.need(TrackingRun).experiment_id == number
    assert client.get_experiment(number).tags == {"mine": "1"}


def test_a_run_that_failed_has_no_model_that_is_ready_until_it_goes_on(server: str, tmp_path: Path) -> None:
    run = _run(tmp_path, server, "failing")
    _train(run, range(1, 3))
    client = mlflow.MlflowClient(server)

    def status() -> tuple[str, str]:
        found = client.get_run(run.need(TrackingRun).run_id)
        (output,) = found.outputs.model_outputs
        return found.info.status, str(client.get_logged_model(output.model_id).status)

    assert status() == ("RUNNING", "PENDING")
    tracking_run.close(run, "FAILED")
    assert status() == ("FAILED", "FAILED")
    tracking_run.start(run, run.recipe())
    assert status() == ("RUNNING", "PENDING")
    _train(run, range(3, 5))  # no second model
    tracking_run.close(run, "FINISHED")
    assert status() == ("FINISHED", "READY")
