"""From a Kubeflow run to the store and MLflow, and back."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.tracking import servers, tracking_run

RECIPE = {
    "name": "tracked",
    "model": {"from_scratch": {}, "tokenizer": {"train": {}}},
    "data": {"source": "builtin:stdlib-docs"},
}
PAGE = "https://kubeflow.test/pipeline/#/runs/details/0000-1"


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RUN_ID", "0000-1")
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kubeflow.test/pipeline/")


def _run(tmp_path: Path, **settings: Any) -> Run:
    run = Run(Storage(str(tmp_path / "store")), "mine")
    run.create(load.validate({**RECIPE, "tracking": settings}, origin="test"))
    return run


def test_mlflow_leads_to_the_kubeflow_run(tmp_path: Path, in_a_pod: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mlflow.db"
    run = _run(tmp_path, mlflow=f"sqlite:///{path}")
    tracking_run.start(run, run.recipe())
    monkeypatch.setenv("KFP_RUN_ID", "0000-2")  # submitted again
    tracking_run.start(run, run.recipe())

    tags = dict(sqlite3.connect(path).execute("select key, value from tags").fetchall())

    again = PAGE.replace("0000-1", "0000-2")
    assert (tags["kubeflow.run_id"], tags["kubeflow.url"]) == ("0000-2", again)
    assert tags["mlflow.note.content"] == f"[Kubeflow run]({again})"
    assert tags["baton.run"] == "mine"


def test_a_page_that_is_not_known_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KF_PIPELINES_UI_ENDPOINT", raising=False)
    monkeypatch.setenv("KFP_RUN_ID", "0000-1")
    assert servers.kubeflow_tags() == {"kubeflow.run_id": "0000-1"}
    monkeypatch.setenv("KFP_RUN_ID", "")  # a pod without the label
    assert servers.kubeflow_tags() == {}


@pytest.mark.parametrize(
    ("settings", "page"),
    [
        ({"mlflow": "http://mlflow:5000"}, "http://mlflow:5000/#/experiments/7/runs/abc?workflowType=machine_learning"),
        (
            {"mlflow": "http://mlflow:5000", "mlflow_page": "https://mlflow.example/"},
            "https://mlflow.example/#/experiments/7/runs/abc?workflowType=machine_learning",
        ),
        ({"mlflow": "sqlite:///mlflow.db"}, None),
    ],
    ids=["server", "another address for people", "no server"],
)
def test_the_page_of_a_run_in_mlflow(settings: dict[str, str], page: str | None, tmp_path: Path) -> None:
    run = _run(tmp_path, **settings)
    run.put("tracking.json", {"mlflow": settings["mlflow"], "run_id": "abc", "experiment_id": "7"})
    assert servers.mlflow_url(run, run.recipe()) == page
