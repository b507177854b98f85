"""Kubeflow's own MLflow: a run lies below its pipeline run's, and the stage's run is left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.runs.documents import TrackingRun
from baton.runs.outcomes import SweepTracking
from baton.runs.run import Run, Sweep
from baton.store.storage import Storage
from baton.sweep import trials
from baton.tracking import servers, tracker, tracking_run
from baton.tracking.client import connect
from baton.tracking.tracker import Tracker
from tests.support.kubeflows_mlflow import KubeflowsMLflow

pytestmark = pytest.mark.slow

RECIPE = {
    "name": "tracked",
    "model": {"from_scratch": {}, "tokenizer": {"train": {}}},
    "data": {"source": "builtin:stdlib-docs"},
}
VARIABLES = ("KFP_RUN_ID", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID")


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "HELD_S", 0.0)  # as with a server: the database stands for one
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kubeflow(tmp_path: Path) -> KubeflowsMLflow:
    return KubeflowsMLflow(tmp_path)


def _enter(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _run(tmp_path: Path, name: str = "mine", **settings: Any) -> Run:
    run = Run(Storage(str(tmp_path / "store")), name)
    run.create(load.validate({**RECIPE, "tracking": {"mlflow": None, **settings}}, origin="test"))
    return run


def _parent(kubeflow: KubeflowsMLflow, run: Run) -> str | None:
    tags: dict[str, str] = kubeflow.client.get_run(run.need(TrackingRun).run_id).data.tags
    return tags.get("mlflow.parentRunId")


def test_a_run_is_below_the_pipelines_and_the_stages_is_untouched(
    kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = kubeflow.pipeline_run()
    variables = kubeflow.stage(root)
    _enter(monkeypatch, variables)
    stage = variables["MLFLOW_RUN_ID"]
    before = kubeflow.rows(stage), kubeflow.client.get_run(root).to_dictionary()
    run = _run(tmp_path)

    tracking_run.start(run, run.recipe())
    with Tracker(run, trains=True) as sending:
        sending.log({"loss": 2.5}, 1)
    tracking_run.log_metrics(run, {"eval_loss": 2.25}, 1)
    tracking_run.tag(run, {"baton.verdict": "accepted"})
    tracking_run.close(run, "FINISHED", {"report.html": "report"})

    own = run.need(TrackingRun)
    assert (own.mlflow, own.experiment_id) == (kubeflow.uri, kubeflow.experiment)
    found = kubeflow.client.get_run(own.run_id)
    assert (found.info.experiment_id, found.info.status) == (kubeflow.experiment, "FINISHED")
    assert found.data.tags["mlflow.parentRunId"] == root
    assert (found.data.metrics["loss"], found.data.metrics["eval_loss"]) == (2.5, 2.25)
    assert kubeflow.count() == 3
    assert (kubeflow.rows(stage), kubeflow.client.get_run(root).to_dictionary()) == before
    assert not kubeflow.client.list_artifacts(stage)
    # the control: what is compared does show a metric, a tag, an end
    kubeflow.client.set_tag(stage, "mine", "1")
    assert kubeflow.rows(stage) != before[0]


@pytest.mark.parametrize("absent", VARIABLES)
def test_without_one_of_its_variables_nothing_is_tracked(
    absent: str, kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _enter(monkeypatch, kubeflow.stage(kubeflow.pipeline_run()))
    monkeypatch.delenv(absent)
    run = _run(tmp_path)
    tracking_run.start(run, run.recipe())
    with Tracker(run) as sending:
        sending.log({"loss": 2.5}, 1)
    tracking_run.close(run, "FINISHED")
    assert run.read(TrackingRun) is None
    assert servers.mlflow_url(run, run.recipe()) is None
    assert kubeflow.count() == 2


def test_a_server_that_the_recipe_names_goes_first(
    kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _enter(monkeypatch, kubeflow.stage(kubeflow.pipeline_run()))
    uri = f"sqlite:///{tmp_path}/own.db"
    run = _run(tmp_path, mlflow=uri)
    tracking_run.start(run, run.recipe())
    assert run.need(TrackingRun).mlflow == uri
    own = connect(uri).get_run(run.need(TrackingRun).run_id)
    assert "mlflow.parentRunId" not in own.data.tags
    assert kubeflow.count() == 2


def test_an_experiment_of_its_own_has_no_parent(
    kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _enter(monkeypatch, kubeflow.stage(kubeflow.pipeline_run()))
    run = _run(tmp_path, experiment="ours")
    tracking_run.start(run, run.recipe())
    number = run.need(TrackingRun).experiment_id
    assert kubeflow.client.get_experiment(number).name == "ours"
    assert _parent(kubeflow, run) is None


def test_later_stages_need_no_variables(
    kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _enter(monkeypatch, kubeflow.stage(kubeflow.pipeline_run()))
    run = _run(tmp_path)
    tracking_run.start(run, run.recipe())
    for name in VARIABLES:
        monkeypatch.delenv(name)
    with Tracker(run) as sending:
        sending.log({"loss": 2.5}, 1)
    tracking_run.close(run, "FINISHED")
    found = kubeflow.client.get_run(run.need(TrackingRun).run_id)
    assert (found.data.metrics["loss"], found.info.status) == (2.5, "FINISHED")


def test_a_forks_and_a_trials_own_parent_go_first(
    kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = kubeflow.pipeline_run()
    _enter(monkeypatch, kubeflow.stage(root))
    above = _run(tmp_path)
    tracking_run.start(above, above.recipe())
    fork = _run(tmp_path, "fork")
    fork.put("fork.json", {"parent": above.uri, "step": 40, "warm": True})
    tracking_run.start(fork, fork.recipe())
    assert _parent(kubeflow, fork) == above.need(TrackingRun).run_id

    sweep = Sweep(above.storage, "s")
    swept = load.with_overrides(above.recipe(), ["sweep.parameters={training.learning_rate: [1e-4, 1e-3]}"])
    parent = trials.tracking_parent(sweep, swept)
    assert parent
    assert sweep.read(SweepTracking) == SweepTracking(mlflow=kubeflow.uri, run_id=parent)
    assert kubeflow.client.get_run(parent).data.tags["mlflow.parentRunId"] == root
    trial = _run(tmp_path, "s-t000")
    trial.put("trial.json", {"sweep": "s", "id": "t000", "tracking": parent})
    for _ in ("begun", "submitted again"):
        tracking_run.start(trial, trial.recipe())
        assert _parent(kubeflow, trial) == parent


def test_a_run_that_is_submitted_again_is_below_the_newest_and_runs_again(
    kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = kubeflow.pipeline_run(), kubeflow.pipeline_run("another")
    _enter(monkeypatch, kubeflow.stage(first))
    run = _run(tmp_path)
    tracking_run.start(run, run.recipe())
    tracking_run.close(run, "KILLED")
    own = run.need(TrackingRun).run_id
    assert kubeflow.client.get_run(own).info.status == "KILLED"

    _enter(monkeypatch, kubeflow.stage(second, kfp_run="another"))
    tracking_run.start(run, run.recipe())
    found = kubeflow.client.get_run(own)
    assert run.need(TrackingRun).run_id == own
    assert (found.info.status, found.data.tags["mlflow.parentRunId"]) == ("RUNNING", second)
    assert found.data.tags["kubeflow.run_id"] == "another"

    tracking_run.close(run, "FAILED")
    for name in VARIABLES:
        monkeypatch.delenv(name)
    tracking_run.start(run, run.recipe())
    found = kubeflow.client.get_run(own)
    assert (found.info.status, found.data.tags["mlflow.parentRunId"]) == ("RUNNING", second)


def test_a_chunk_that_trains_again_runs_and_an_evaluation_changes_nothing(
    kubeflow: KubeflowsMLflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _enter(monkeypatch, kubeflow.stage(kubeflow.pipeline_run()))
    run = _run(tmp_path)
    tracking_run.start(run, run.recipe())

    def status() -> str:
        return str(kubeflow.client.get_run(run.need(TrackingRun).run_id).info.status)

    tracking_run.close(run, "FAILED")
    tracking_run.log_metrics(run, {"eval_loss": 2.25}, 1)
    assert status() == "FAILED"
    with Tracker(run, trains=True) as sending:
        sending.log({"loss": 2.5}, 1)
    assert status() == "RUNNING"
