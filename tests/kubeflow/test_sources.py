"""What `baton status` still explains once `/apis/v1beta1`, and with it the Argo workflow, is gone.

Each recording without that answer, by each of the other sources: Kubeflow's own list, the tasks that replace it after
2.17, the store, Kubernetes' pods.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.kubeflow import connection, run_status
from baton.kubeflow.run_status import StageStatus
from baton.runs.outcomes import RunFailure
from baton.runs.run import Run, now
from baton.store.storage import Storage
from tests.kubeflow.test_recordings import FROZEN, LAUNCHER, LOST, OWN, TABLE, VERSIONS, Expected, recorded, status
from tests.support.kube_api import KubeApi

assert status  # a fixture
Ask = Callable[..., tuple[dict[str, Any], str]]

UNTOLD: dict[str, Expected] = {
    "pod-lost-failed": Expected("failed", 1, TABLE["pod-lost-failed"].counts),
    "toy-exits-not-retried": Expected("failed", 1, {"failed": 3}),
    "root-driver-lost": Expected("failed", 1, {"failed": 1, "waiting": 9}, said=(f"{OWN}: It starts the stages",)),
    "gpu-promised": Expected("failed", 1, TABLE["gpu-promised"].counts),
    "api-away": Expected("failed", 1, TABLE["api-away"].counts),
    "failed-user-error": Expected("failed", 1, TABLE["failed-user-error"].counts),
    "waits-for-secret": Expected("running", 0, {"running": 1, "waiting": 8}),
    "waits-for-image": Expected("running", 0, {"running": 1, "waiting": 8}),
    "waits-for-memory": Expected("running", 0, {"succeeded": 2, "running": 1, "waiting": 6}),
    "groups-of-chunks-running": Expected("running", 0, {"succeeded": 15, "unknown": 30}, said=(FROZEN,)),
    "failed-workflow-too-large": Expected("failed", 1, {"succeeded": 1, "unknown": 204}, said=(FROZEN,)),
}
"""By Kubeflow's list alone, where that is less than with the workflow: states and times, and no reason.

The stand-in of groups was recorded between two stages; its newest is days old by now, as in a record that has stopped.
"""
BY_PODS = {
    **TABLE,
    "succeeded-cached": Expected("succeeded", 0, {"succeeded": 13}),  # no pod has what the cache answered
    "groups-of-chunks-running": Expected("running", 0, {"succeeded": 15, "waiting": 30}),
    "pod-deleted-retried": Expected("succeeded", 0, {"succeeded": 13}),  # its pod is gone
    "failed-workflow-too-large": UNTOLD["failed-workflow-too-large"],  # by recording, no node of it is known
}
"""With a kubeconfig: all but what no pod has."""


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with KubeApi() as api:
        monkeypatch.setenv("KUBECONFIG", api.kubeconfig(tmp_path))
        yield api


@pytest.fixture
def asked(status: Callable[..., tuple[Any, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """Returns what `baton status --json` shows and says of a recording without its workflow."""
    monkeypatch.setattr(run_status, "LAG_S", 0.0)
    monkeypatch.setenv("HOME", str(tmp_path))

    def ask(name: str, changed: dict[str, Any] | None = None, **options: Any) -> tuple[dict[str, Any], str]:
        recording = changed or recorded(name)
        done, said = status(name, changed={**recording, "workflow": None}, **options)
        return {**json.loads(done.stdout), "code": done.exit_code}, said

    return ask


def _is(shown: dict[str, Any], said: str, expected: Expected) -> None:
    stages = {stage["name"]: stage for stage in shown["stages"]}
    assert (shown["state"], shown["code"]) == (expected.state, expected.code)
    assert Counter(stage["state"] for stage in stages.values()) == expected.counts
    assert {key: stages[key]["message"] for key in expected.messages} == expected.messages
    for text in expected.said:
        assert text in said


@pytest.mark.parametrize("name", TABLE)
def test_kubeflows_list_alone_tells_states_and_nothing_wrong(name: str, asked: Ask) -> None:
    shown, said = asked(name)
    _is(shown, said, UNTOLD.get(name, Expected(TABLE[name].state, TABLE[name].code, TABLE[name].counts)))
    assert not [stage for stage in shown["stages"] if stage["message"]]


@pytest.mark.parametrize("name", TABLE)
def test_with_a_kubeconfig_pods_tell_what_the_workflow_told(name: str, asked: Ask, kube: KubeApi) -> None:
    recording = recorded(name)
    kube.add(recording["run"]["run_id"], recording["workflow"])
    shown, said = asked(name)
    expected = BY_PODS[name]
    # Argo's setting is the workflow's alone.
    said_of_pods = tuple(text for text in expected.said if not text.startswith("a killed or evicted pod"))
    _is(
        shown,
        said,
        Expected(expected.state, expected.code, expected.counts, expected.stages, expected.messages, said_of_pods),
    )


def _as_tasks(stages: Sequence[StageStatus]) -> list[dict[str, Any]]:
    """Returns what the API after 2.17 would list of stages, by its protos, in two pages."""
    states = {"PENDING": "RUNNING", "WAITING": None, "UNKNOWN": None, "CANCELED": "FAILED"}
    tasks = []
    for stage in stages:
        state = states.get(stage.state, stage.state)
        told = [{"name": key, "state": state, "type": "CONDITION"} for key in stage.parents if state == "SKIPPED"]
        if state not in (None, "SKIPPED"):
            pods = [{"name": "driver", "type": "DRIVER"}, {"name": f"pod-of-{stage.key}", "type": "EXECUTOR"}]
            about = {"name": stage.key, "scope_path": ".".join(("root", *stage.path)), "state": state, "pods": pods}
            times = {"create_time": stage.started, "end_time": stage.ended}
            about |= {name: time.isoformat() for name, time in times.items() if time}
            told.append({**about, "type": "RUNTIME", "status_metadata": {"message": stage.message or ""}})
        tasks += told
    return [{"tasks": tasks[:3], "next_page_token": "more"}, {"tasks": tasks[3:]}]


# The first is a driver of no task, and the second, without a workflow, a record that has stopped: see `UNTOLD`.
@pytest.mark.parametrize("name", sorted(TABLE.keys() - {"root-driver-lost", "groups-of-chunks-running"}))
def test_the_next_kubeflows_tasks_tell_what_its_list_and_workflow_told(
    name: str, status: Callable[..., tuple[Any, str]], asked: Ask, kfp_api: Any
) -> None:
    recording = recorded(name)
    status(name)
    client = connection.connect(kfp_api.url)
    run = client.get_run(recording["run"]["run_id"])
    stages = run_status.explained(client, run, run_status.stages(client, run)).stages
    shown, _ = asked(name, {**recording, "run": {**recording["run"], "run_details": None}, "tasks": _as_tasks(stages)})
    words = {"PENDING": "running"}  # the API has no other word
    expected = {stage.name: (words.get(stage.state, stage.state.lower()), stage.message) for stage in stages}
    assert {stage["name"]: (stage["state"], stage["message"]) for stage in shown["stages"]} == expected


@pytest.mark.parametrize("others", ["ended", "none ended", "none"])
def test_a_failed_stage_without_its_pod_has_lost_it_where_others_have_theirs(
    others: str, asked: Ask, kube: KubeApi
) -> None:
    """Where pods are removed at their end, or the cluster is another, a missing one tells nothing."""
    recording = recorded("pod-lost-failed")
    kube.add(recording["run"]["run_id"], recording["workflow"])
    for name, pod in list(kube.pods.items()):
        if "train-chunk-2(0).executor" in pod["metadata"]["annotations"]["workflows.argoproj.io/node-name"]:
            del kube.pods[name]
        elif others == "none ended":
            pod["status"] = {"phase": "Running"}
    if others == "none":
        kube.pods.clear()
    shown, said = asked("pod-lost-failed")
    (failed,) = [stage for stage in shown["stages"] if stage["state"] == "failed"]
    assert failed["message"] == ("pod deleted" if others == "ended" else None)
    assert (f"train chunk 2: {LOST}" in said) is (others == "ended")


@pytest.mark.parametrize("status_code", [401, 403, 500])
def test_a_cluster_that_does_not_answer_is_no_source(status_code: int, asked: Ask, kube: KubeApi) -> None:
    kube.status = status_code
    shown, said = asked("pod-lost-failed")
    _is(shown, said, UNTOLD["pod-lost-failed"])


STAGES = {"pod-lost-failed": "train chunk 2", "gpu-promised": "train chunk 1", "api-away": "train chunk 1"} | {
    "failed-user-error": "data split"
}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("whose", ["its own", "another's", "an earlier attempt's"])
def test_a_stages_own_failure_is_told_by_the_store(name: str, whose: str, asked: Ask, tmp_path: Path) -> None:
    run = recorded(name)["run"]
    spec = run.get("pipeline_spec") or recorded(VERSIONS.get(name, "succeeded"))["run"]["pipeline_spec"]
    given = run["runtime_config"]["parameters"].get("run_name")
    training = Run(Storage(str(tmp_path)), given or f"{spec['pipelineInfo']['name']}-{run['run_id']}")
    stage = "export" if whose == "another's" else STAGES[name]
    at = "2020-01-01T00:00:00.000Z" if whose == "an earlier attempt's" else now()
    training.write(RunFailure(stage=stage, message="a row is damaged.", remedy="Mend it.", exit_code=2, at=at))
    shown, said = asked(name, store=str(tmp_path))
    (failed,) = [each for each in shown["stages"] if each["state"] == "failed"]
    assert failed["message"] == ("a row is damaged." if whose == "its own" else None)
    assert LAUNCHER not in said


@pytest.mark.parametrize("place", ["error", "state_history"])
def test_an_error_in_kubeflows_list_is_told(place: str, asked: Ask) -> None:
    recording = recorded("pod-lost-failed")
    error = {"code": 2, "message": "main: Error (exit code 137)"}
    for detail in recording["run"]["run_details"]["task_details"]:
        if detail.get("display_name") in ("train-chunk-2", "train-chunk-2(0)"):
            detail |= {"error": error} if place == "error" else {"state_history": [{"state": "FAILED", "error": error}]}
    shown, said = asked("pod-lost-failed", recording)
    _is(shown, said, Expected("failed", 1, TABLE["pod-lost-failed"].counts, messages=TABLE["pod-lost-failed"].messages))
    assert f"train chunk 2: {LOST}" in said


@pytest.mark.parametrize("name", ["pod-lost-failed", "gpu-promised", "failed-workflow-too-large"])
@pytest.mark.parametrize("source", ["none", "pods"])
def test_only_what_a_source_calls_lost_is_lost(
    name: str, source: str, asked: Ask, kube: KubeApi, kfp_api: Any, tmp_path: Path
) -> None:
    recording = recorded(name)
    if source == "pods":
        kube.add(recording["run"]["run_id"], recording["workflow"])
    asked(name, store=str(tmp_path / "store"))
    client = connection.connect(kfp_api.url)
    remote = client.get_run(recording["run"]["run_id"])
    view = run_status.explained_by_store(client, remote, run_status.stages(client, remote))
    assert view.is_lost is ((name, source) == ("pod-lost-failed", "pods"))
