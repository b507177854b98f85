"""Baton's runs of a namespace at a glance, logs from whoever still has them, and what a waiting pod waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.runs.documents import Progress, RunInfo
from baton.runs.plan import Plan
from baton.runs.run import Run, now
from baton.store.storage import Storage
from tests.kubeflow.test_heal import LOST, Backend, ago, backend, ended, recorded
from tests.support.kube_api import KubeApi

assert backend  # a fixture


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with KubeApi() as api:
        monkeypatch.setenv("KUBECONFIG", api.kubeconfig(tmp_path))
        yield api


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def baton(*words: str) -> Any:
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def training(backend: Backend, name: str, *, step: int) -> None:
    """Puts a run into the store that is at a step of 200."""
    run = Run(Storage(str(backend.store)), name)
    run.put(RunInfo.NAME, {"recipe": {"name": "quick"}, "created": now()})
    run.put(Plan.NAME, {"rows": 1, "steps_per_epoch": 1, "num_steps": 200, "targets": [50, 100, 150, 200]})
    run.write(Progress(step=step, chunk=2, seconds_per_step=0.5, at=now()))


def test_batons_runs_are_listed_with_what_their_stores_know(backend: Backend) -> None:
    backend.add("running", display_name="going", **ended("PENDING", "RUNNING", "FAILED", "RUNNING"), created_at=ago(9))
    backend.add("waits-for-memory", display_name="stuck", created_at=ago(8))
    backend.add("pod-lost-failed", **ended(*LOST), created_at=ago(7))
    backend.add("toy-exits-not-retried", created_at=ago(6))  # somebody else's
    backend.add("succeeded", storage_state="ARCHIVED", created_at=ago(5))
    going = backend.api.runs[next(iter(backend.api.runs))]
    training(backend, going["runtime_config"]["parameters"]["run_name"], step=80)
    rows = json.loads(baton("status", "--json").stdout)["runs"]
    shown = {row["run"]: row for row in rows}
    assert list(shown) == ["lost", "stuck", "going"], "the newest first"
    known = {key: shown["going"][key] for key in ("state", "stage", "step", "num_steps", "seconds_left", "starts")}
    assert known == {
        "state": "running", "stage": "train chunk 2", "step": 80, "num_steps": 200, "seconds_left": 60.0, "starts": 2,
    }  # fmt: skip
    assert shown["stuck"]["waits"].startswith("train chunk 1: Unschedulable: 0/1 nodes are available")
    assert (shown["stuck"]["step"], shown["stuck"]["seconds_left"]) == (0, None)
    assert (shown["lost"]["state"], shown["lost"]["stage"]) == ("failed", "train chunk 2")
    text = baton("status").stdout
    assert "80 of 200" in text
    assert "stuck: train chunk 1: Unschedulable" in text


def test_the_page_lists_the_same(backend: Backend) -> None:
    run_id = backend.add("waits-for-memory", display_name="<stuck>")
    page = json.loads(baton("open", "--kubeflow", "--json").stdout)["page"]
    text = Path(page).read_text()
    assert "&lt;stuck&gt;" in text
    assert f"/#/runs/details/{run_id}" in text
    assert "Insufficient memory" in text


@pytest.mark.parametrize("words", [("open",), ("open", "mine", "--kubeflow"), ("status",)])
def test_what_is_missing_is_named(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    done = baton(*words)
    assert done.exit_code == 2
    assert "--kubeflow" in done.stderr or "--endpoint" in done.stderr


# logs


@pytest.mark.parametrize("where", ["pod", "archive", "archive of a retry", "nowhere"])
@pytest.mark.parametrize("words", [(), ("train chunk 2",), ("--stage", "train chunk 2")])
def test_a_log_is_had_from_the_pod_or_from_the_archive(
    where: str, words: tuple[str, ...], backend: Backend, kube: KubeApi, tmp_path: Path
) -> None:
    """Kubeflow's own route answers 400 in an installation without users."""
    run_id = backend.add("pod-lost-failed")
    recording = recorded("pod-lost-failed")
    kube.add(run_id, recording["workflow"])
    nodes = recording["workflow"]["status"]["nodes"].values()
    (node,) = [each for each in nodes if each["name"].endswith("train-chunk-2(0).executor(0)")]
    name, template = recording["workflow"]["metadata"]["name"], node["templateName"]
    if where == "pod":
        kube.logs[f"{name}-{template}-{node['id'].rpartition('-')[2]}"] = "one\ntwo\n"
    artifacts = {"data": {"defaultPipelineRoot": str(tmp_path / "artifacts")}}
    kube.others["/api/v1/namespaces/kubeflow/configmaps/kfp-launcher"] = artifacts
    folder = tmp_path / "artifacts" / "quick" / run_id / "train-chunk-2" / "0a1b"
    if where.startswith("archive"):
        folder.mkdir(parents=True)
        (folder / ("executor-logs" if where == "archive" else "executor-logs-1")).write_text("one\ntwo\n")
        (folder / "checkpoint").write_text("no log")
    done = baton("logs", "lost", *words, "--json")
    shown = json.loads(done.stdout)
    if where == "nowhere":
        assert done.exit_code == 1
        assert "executor-logs" in shown["error"]
    else:
        assert (shown["stage"], shown["lines"]) == ("train chunk 2", ["one", "two"])


# a queue

NO_ROOM = "insufficient unused quota for nvidia.com/gpu in flavor default, 1 more needed"
QUEUED = {"kueue.x-k8s.io/queue-name": "team-a"}


@pytest.mark.parametrize("reads_workloads", [True, False])
def test_a_pod_that_waits_for_kueue_tells_the_queue_and_the_reason(
    reads_workloads: bool, backend: Backend, kube: KubeApi
) -> None:
    run_id = backend.add("waits-for-memory")
    kube.add(run_id, recorded("waits-for-memory")["workflow"])
    (pod,) = [pod for pod in kube.pods.values() if pod["status"]["phase"] == "Pending"]
    pod["metadata"]["labels"] |= QUEUED
    pod["metadata"]["uid"] = "u-1"
    pod["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}], "priorityClassName": "baton-spot"}
    workload = {
        "metadata": {"ownerReferences": [{"uid": "u-1"}]},
        "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": NO_ROOM}]},
    }
    if reads_workloads:
        kube.others["/apis/kueue.x-k8s.io/v1beta1/namespaces/kubeflow/workloads"] = {"items": [workload]}
    reason = f": {NO_ROOM}" if reads_workloads else ""
    message = f"Kueue: waits for queue 'team-a'{reason} (priority class baton-spot)"
    (row,) = json.loads(baton("status", "--json").stdout)["runs"]
    assert row["waits"] == f"train chunk 1: {message}"
    done = baton("status", run_id, "--endpoint", backend.api.url, "--json")
    stages = {stage["name"]: stage for stage in json.loads(done.stdout)["stages"]}
    assert (stages["train chunk 1"]["state"], stages["train chunk 1"]["message"]) == ("pending", message)


def test_a_pod_that_waits_for_a_node_tells_its_priority(backend: Backend, kube: KubeApi) -> None:
    run_id = backend.add("waits-for-memory")
    kube.add(run_id, recorded("waits-for-memory")["workflow"])
    for pod in kube.pods.values():
        pod["spec"] = {"priorityClassName": "baton-spot"}
    (row,) = json.loads(baton("status", "--json").stdout)["runs"]
    assert row["waits"].endswith("1 Insufficient memory. (priority class baton-spot)")
