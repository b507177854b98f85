"""`baton kfp heal`: runs that lost pods have ended start again; none that failed by itself, was canceled or is late.

Against recordings of a real Kubeflow Pipelines 2.17, and a model of its API that answers as they do.
"""

from __future__ import annotations

import copy
import datetime
import gzip
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli import follow
from baton.cli.app import app
from baton.kubeflow import connection, heal, run_status, submit
from baton.kubeflow.heal import Action, Decision, Policy
from baton.pages.collect import RunReport
from baton.pages.run_page import render
from baton.recipe import load
from baton.retrain import RetrainLock
from baton.runs.documents import NodeChoice, Progress
from baton.runs.plan import Plan
from baton.runs.run import Run, Sweep, now
from baton.store.storage import Storage

ASSETS = Path(__file__).parents[1] / "assets/kubeflow-2.17"
VERSIONS = {"root-driver-lost": "running", "healed-by-retry": "running", "api-away": "running"}
"""Recording of a run from a version of a pipeline → recording that has that pipeline; `succeeded` where left out."""


def recorded(name: str) -> dict[str, Any]:
    with gzip.open(ASSETS / f"{name}.json.gz") as file:
        recording: dict[str, Any] = json.load(file)
        return recording


@dataclass
class Backend:
    """The model of the API with recorded runs, and a store for them."""

    api: Any
    answer: Any
    store: Path

    def add(self, name: str, **changes: Any) -> str:
        """Puts a recorded run there, with its store here, and returns its id."""
        recording = copy.deepcopy(recorded(name))
        run = recording["run"]
        if name != "toy-exits-not-retried":
            run.setdefault("runtime_config", {}).setdefault("parameters", {})["store"] = str(self.store)
        run.update(changes)
        version = recorded(VERSIONS.get(name, "succeeded"))["run"]["pipeline_spec"]
        return str(self.api.add_recorded(run, recording["workflow"], version))

    def retries(self) -> int:
        return sum(path.endswith(":retry") for _, path in self.api.requests)

    def submissions(self) -> int:
        return sum(request == ("POST", "/apis/v2beta1/runs") for request in self.api.requests)

    def look(self, run_id: str, policy: Policy = Policy(3), starts: int = 0) -> Decision:  # noqa: B008
        client = connection.connect(self.api.url)
        return heal.look(client, client.get_run(run_id), None, policy, starts)

    def training(self, run_id: str) -> Run:
        client = connection.connect(self.api.url)
        remote = client.get_run(run_id)
        return run_status.training_run(remote, client.specification(remote), "")

    def claims(self, run_id: str) -> list[str]:
        return Storage(str(self.store)).list(f"heals/{run_id}")


@pytest.fixture
def backend(kfp_api: Any, kfp_api_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(submit, "RESUMES_IN_S", 0.2)
    monkeypatch.setattr(submit, "POLL_S", 0.01)
    monkeypatch.setenv("BATON_KFP_ENDPOINT", kfp_api.url)
    return Backend(kfp_api, kfp_api_module.RawAnswer, tmp_path)


def ago(seconds: float) -> str:
    return (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)).isoformat()


def ended(*states: str, seconds: float = 3600) -> dict[str, Any]:
    """Returns a run's state and history, the last of it some seconds ago."""
    history = [{"state": state, "update_time": ago(seconds)} for state in states]
    return {"state": states[-1], "state_history": history, "finished_at": ago(seconds)}


LOST = ("PENDING", "RUNNING", "FAILED")
TABLE = {  # recording → decision about it
    "api-away": (Action.RETRIED, "train chunk 1 was lost (main: Error (exit code 1)); start 1 of 3"),
    "by-version": (Action.LEFT, "it is succeeded"),
    "cancelled-waiting": (Action.LEFT, "it was canceled"),
    "failed-user-error": (Action.RETRIED, "data split was lost (main: Error (exit code 1)); start 1 of 3"),
    "failed-workflow-too-large": (Action.LEFT, "Argo says: Request entity too large"),
    "gpu-promised": (Action.LEFT, "train chunk 1 failed by itself: this pod was promised 1 GPU and sees 0"),
    "groups-of-chunks-running": (Action.RETRIED, "it runs"),
    "groups-of-chunks-succeeded": (Action.LEFT, "it is succeeded"),
    "healed-by-retry": (Action.LEFT, "it is succeeded"),
    "phases-record-frozen": (Action.LEFT, "it is succeeded"),
    "pod-deleted-retried": (Action.LEFT, "it is succeeded"),
    "pod-lost-failed": (Action.RETRIED, "train chunk 2 was lost (main: Error (exit code 137)); start 1 of 3"),
    "pod-lost-retried": (Action.LEFT, "it is succeeded"),
    "rejected": (Action.LEFT, "it is rejected"),
    "retrained": (Action.LEFT, "it is succeeded"),
    "root-driver-lost": (
        Action.RETRIED,
        "Kubeflow's own pod of the pipeline was lost (main: Error (exit code 137)); start 1 of 3",
    ),
    "running": (Action.RETRIED, "it runs"),
    "running-100-chunks-record-frozen": (Action.RETRIED, "it runs"),
    "succeeded": (Action.LEFT, "it is succeeded"),
    "succeeded-cached": (Action.LEFT, "it is succeeded"),
    "sweep-record-frozen": (Action.LEFT, "it is succeeded"),
    "toy-exits-not-retried": (Action.LEFT, "exit failed by itself: main: Error (exit code 1)"),
    "waits-for-image": (Action.RETRIED, "it runs"),
    "waits-for-memory": (Action.RETRIED, "it runs"),
    "waits-for-secret": (Action.RETRIED, "it runs"),
}
"""An older Baton wrote no termination message: `failed-user-error` cannot be told from a launcher that was lost."""


def test_every_recording_is_in_the_table() -> None:
    assert {path.name.removesuffix(".json.gz") for path in ASSETS.iterdir()} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_recorded_run_is_started_again_if_lost_pods_alone_ended_it(name: str, backend: Backend) -> None:
    run_id = backend.add(name)
    decision = backend.look(run_id)
    action, reason = TABLE[name]
    assert (decision.action, decision.run_id) == (action, run_id)
    assert reason in decision.reason
    is_started = action is Action.RETRIED and reason != "it runs"
    assert backend.retries() == is_started
    assert backend.claims(run_id) == (["001-01.json"] if is_started else [])
    assert backend.submissions() == 0


def _fails(run: dict[str, Any], workflow: dict[str, Any], node: str, message: str) -> None:
    """Lets a recorded run that went well fail at a pod, in the workflow and in the API's list."""
    run |= ended(*LOST)
    (found,) = [each for each in workflow["status"]["nodes"].values() if each["name"].endswith(f"{node}(0)")]
    found |= {"phase": "Failed", "message": message}
    key = node.removesuffix("(0).executor")
    for detail in run["run_details"]["task_details"]:
        if detail.get("display_name") in (key, f"{key}(0)"):
            detail["state"] = "FAILED"
        if node.endswith("-driver") and detail.get("display_name") == key.removesuffix("-driver"):
            detail.pop("state", None)


NODES = ("train-chunk-2(0).executor", "export(0).executor", "export-driver", "root-driver")
MESSAGES = {  # message of a pod → whether it was lost
    "main: Error (exit code 137)": True,
    "main: Error (exit code 143)": True,
    "pod deleted": True,
    "The node was low on resource: memory.": True,
    "Pod Node didn't have enough resource: Preempted in order to admit critical pod": True,
    "main: Error (exit code 1)": True,  # the launcher's, as a stage leaves its words
    "main: OOMKilled (exit code 1)": False,
    "main: OOMKilled (exit code 137)": False,
    "main: Error (exit code 1): a row is damaged. (baton exit code 2)": False,
    "main: Error (exit code 1): the loss is nan. (baton exit code 1)": False,
    "Pod was active on the node longer than the specified deadline: DeadlineExceeded": False,
    "ImagePullBackOff: Back-off pulling image": False,
}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (node, message)
        for node, message in itertools.product(NODES, MESSAGES)
        if "baton" not in message or "exec" in node
    ],
)
def test_what_is_lost_is_the_pods_word(node: str, message: str, backend: Backend) -> None:
    """A chunk, another stage, a driver of a stage and of the pipeline: each by each end of a pod."""
    run_id = backend.add("succeeded")
    run = backend.api.runs[run_id]
    _fails(run, run["_workflow"], node, message)
    decision = backend.look(run_id)
    is_lost = MESSAGES[message]
    assert decision.action is (Action.RETRIED if is_lost else Action.LEFT), decision.reason
    assert backend.retries() == is_lost


@pytest.mark.parametrize(
    ("changes", "action", "reason"),
    [
        (ended(*LOST), Action.RETRIED, "start 1 of 3"),
        (ended("PENDING", "RUNNING", "CANCELING", "FAILED"), Action.LEFT, "it was canceled"),
        (ended("PENDING", "RUNNING", "CANCELED"), Action.LEFT, "it was canceled"),
        (ended("PENDING", "RUNNING", "CANCELING", "FAILED", "RUNNING", "FAILED"), Action.RETRIED, "start 1 of 3"),
        ({"storage_state": "ARCHIVED"}, Action.LEFT, "it is archived"),
        (ended("PENDING", "RUNNING", "SUCCEEDED"), Action.LEFT, "it is succeeded"),
        (ended("PENDING", "RUNNING"), Action.RETRIED, "it runs"),
        (ended("PENDING", "RUNNING", "CANCELING"), Action.RETRIED, "it runs"),
        ({"state_history": []}, Action.RETRIED, "start 1 of 3"),
    ],
    ids=[
        "lost",
        "canceled",
        "canceled, newer",
        "canceled before",
        "archived",
        "succeeded",
        "runs",
        "ends",
        "no history",
    ],
)
def test_the_state_of_a_run_decides(changes: dict[str, Any], action: Action, reason: str, backend: Backend) -> None:
    decision = backend.look(backend.add("pod-lost-failed", **changes))
    assert (decision.action, reason in decision.reason) == (action, True), decision.reason
    assert backend.retries() == (reason == "start 1 of 3")


@pytest.mark.parametrize(("age", "deadline", "is_over"), [(50, 60, False), (70, 60, True)])
def test_a_run_past_its_deadline_is_left(age: int, deadline: int, is_over: bool, backend: Backend) -> None:
    run_id = backend.add("pod-lost-failed", **ended(*LOST, seconds=5), created_at=ago(age))
    platform = {"platforms": {"kubernetes": {"pipelineConfig": {"activeDeadlineSeconds": deadline}}}}
    run = backend.api.runs[run_id]
    run["pipeline_spec"] = {"pipeline_spec": run["pipeline_spec"], "platform_spec": platform}
    decision = backend.look(run_id)
    assert decision.action is (Action.LEFT if is_over else Action.RETRIED), decision.reason
    assert ("resources.deadline is over" in decision.reason) is is_over


@pytest.mark.parametrize("ends", range(1, 6))
@pytest.mark.parametrize("by", ["healers", "hand"])
def test_a_run_is_started_so_often_and_no_more(ends: int, by: str, backend: Backend) -> None:
    """Starts by a person do not count, and those of the caller do without a store."""
    run_id = backend.add("pod-lost-failed", **ended("PENDING", *LOST[1:] * ends, seconds=10**5))
    for end in range(1, ends) if by == "healers" else ():
        Storage(str(backend.store)).create(f"heals/{run_id}/{end:03d}-01.json", json.dumps({"at": now()}).encode())
    decision = backend.look(run_id)
    may = ends <= 3 or by == "hand"
    assert decision.action is (Action.RETRIED if may else Action.LEFT), decision.reason
    assert f"it was started again {ends - 1} of 3 times" in decision.reason or may
    assert backend.retries() == may


@pytest.mark.parametrize(
    ("starts", "seconds", "wait"), [(0, 0, 0), (1, 10, 50), (1, 61, 0), (2, 61, 59), (2, 121, 0), (9, 1801, 0)]
)
def test_each_pause_is_twice_the_last(starts: int, seconds: float, wait: float, backend: Backend) -> None:
    run_id = backend.add("pod-lost-failed", **ended(*LOST, seconds=seconds))
    decision = backend.look(run_id, Policy(10), starts)
    assert decision.action is (Action.WAITS if wait else Action.RETRIED), decision.reason
    assert decision.wait_s == pytest.approx(wait, abs=5)


# two healers at once


@pytest.mark.parametrize("can_retry", [True, False], ids=["retried", "submitted again"])
@pytest.mark.parametrize("with_store", [True, False])
def test_of_two_healers_one_starts_a_run(with_store: bool, can_retry: bool, backend: Backend) -> None:
    """Both have seen the run as lost before either starts it; without claims each does, the negative control."""
    backend.api.retry_fails = not can_retry
    run_id = backend.add("pod-lost-failed")
    seen = threading.Barrier(2, timeout=60)
    looks: dict[int, int] = {}

    def both_have_seen(method: str, path: str) -> None:
        me = threading.get_ident()  # a connection, and so a healer
        if path.startswith("/apis/v1beta1/runs/") and not looks.setdefault(me, 0):
            looks[me] += 1
            together()
        if not with_store and (path.endswith(":retry") or (method == "POST" and path.endswith("/runs"))):
            together()

    def together() -> None:
        backend.api._lock.release()
        try:
            seen.wait()
        finally:
            backend.api._lock.acquire()

    backend.api.interfere = both_have_seen
    policy = Policy(3, needs_store=with_store)
    if not with_store:
        backend.api.runs[run_id]["runtime_config"]["parameters"]["store"] = "s3://nowhere.invalid/x"
    with ThreadPoolExecutor(2) as pool:
        decisions = [job.result() for job in [pool.submit(backend.look, run_id, policy) for _ in range(2)]]
    actions = sorted(decision.action for decision in decisions)
    if with_store:
        started = Action.RETRIED if can_retry else Action.RESUBMITTED
        assert actions == sorted([started, Action.WAITS]) or actions == [Action.RETRIED, Action.RETRIED]
        assert backend.retries() == 1
        assert backend.submissions() == (0 if can_retry else 1)
    else:
        assert backend.retries() == 2
        assert backend.submissions() == (0 if can_retry else 2)


@pytest.mark.parametrize(("seconds", "is_taken"), [(10, True), (299, True), (301, False)])
def test_a_claim_that_nothing_has_come_of_ends(seconds: float, is_taken: bool, backend: Backend) -> None:
    """Its healer may have died before the request: none is left."""
    run_id = backend.add("pod-lost-failed")
    claim = json.dumps({"at": ago(seconds)}).encode()
    Storage(str(backend.store)).create(f"heals/{run_id}/001-01.json", claim)
    decision = backend.look(run_id)
    assert decision.action is (Action.WAITS if is_taken else Action.RETRIED), decision.reason
    assert backend.claims(run_id) == ["001-01.json", *([] if is_taken else ["001-02.json"])]
    assert backend.retries() == (not is_taken)


@pytest.mark.parametrize(
    ("name", "at"),
    [("pod-lost-failed", 1), ("pod-lost-failed", 2), ("pod-lost-failed", 3), ("gpu-promised", 1), ("gpu-promised", 2)],
)
def test_a_run_that_a_person_starts_meanwhile_is_theirs(at: int, name: str, backend: Backend) -> None:
    """Before each request of a look."""
    run_id, requests = backend.add(name), itertools.count()

    def starts(method: str, path: str) -> None:
        if run_id in path and next(requests) == at:
            backend.api._retry(backend.api.runs[run_id])

    backend.api.interfere = starts
    assert backend.look(run_id).action is Action.RETRIED
    assert [each["state"] for each in backend.api.runs[run_id]["state_history"]].count("PENDING") == 2
    assert backend.submissions() == 0


# what the API cannot retry


@pytest.mark.parametrize("name", ["pod-lost-failed", "root-driver-lost"])
@pytest.mark.parametrize("run_name", ["mine", ""])
def test_what_cannot_be_retried_is_submitted_again_and_continues_the_same_run(
    name: str, run_name: str, backend: Backend
) -> None:
    backend.api.retry_fails = True
    run_id = backend.add(name)
    before = backend.api.runs[run_id]
    before["runtime_config"]["parameters"] |= {"run_name": run_name}
    decision = backend.look(run_id)
    assert decision.action is Action.RESUBMITTED
    after = backend.api.runs[decision.run_id]
    pipeline = backend.api.spec(before)["pipelineInfo"]["name"]
    given = {**before["runtime_config"]["parameters"], "run_name": run_name or f"{pipeline}-{run_id}"}
    assert after["runtime_config"]["parameters"] == given
    for key in ("display_name", "experiment_id", "service_account", "pipeline_spec", "pipeline_version_reference"):
        assert after.get(key) == before.get(key), key
    # The old one is done with; the new one's starts continue its count and its time.
    assert backend.look(run_id) == Decision(
        Action.REPLACED, f"run {decision.run_id} has taken its place", decision.run_id
    )
    origin = json.loads((backend.store / "heals" / decision.run_id / "from.json").read_text())
    assert (origin["run_id"], origin["starts"]) == (run_id, 1)
    assert origin["began"].startswith(before["created_at"][:19])
    assert backend.look(decision.run_id).reason == "it runs"


def test_the_count_goes_on_in_the_run_that_replaces_another(backend: Backend) -> None:
    run_id = backend.add("pod-lost-failed")
    origin = {"run_id": "older", "starts": 3, "began": ago(100)}
    Storage(str(backend.store)).create(f"heals/{run_id}/from.json", json.dumps(origin).encode())
    assert "started again 3 of 3 times" in backend.look(run_id).reason
    assert backend.retries() == 0


# errors between the steps

STEPS: dict[str, Callable[[str, str], bool]] = {
    "first look": lambda method, path: method == "GET" and "/v2beta1/runs/" in path,
    "listing": lambda method, path: method == "GET" and path.endswith("/v2beta1/runs"),
    "second look": lambda method, path: method == "GET" and "/v2beta1/runs/" in path,
    "retry": lambda method, path: path.endswith(":retry"),
    "retry, done": lambda method, path: path.endswith(":retry"),
    "submission": lambda method, path: method == "POST" and path.endswith("/v2beta1/runs"),
    "submission, done": lambda method, path: method == "POST" and path.endswith("/v2beta1/runs"),
}


@pytest.mark.parametrize("status", [401, 500, 503, 504])
@pytest.mark.parametrize("step", STEPS)
def test_an_error_between_the_steps_starts_nothing_twice_and_leaves_nothing(
    step: str, status: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer is an error, perhaps after the deed; rounds that follow bring the run on its way, once."""
    monkeypatch.setattr(heal, "CLAIM_S", 0.0)
    run_id = backend.add("pod-lost-failed")
    backend.api.retry_fails = step.startswith("submission")
    failures, looks = [], itertools.count()

    def fails(method: str, path: str) -> Any:
        if failures or not STEPS[step](method, path):
            return None
        if step == "second look" and next(looks) == 0:
            return None
        failures.append(path)
        if step == "retry, done":
            backend.api._retry(backend.api.runs[run_id])
        if step == "submission, done":
            again = {**backend.api.runs[run_id], "state": "PENDING", "run_id": "new", "created_at": now()}
            backend.api.runs["new"] = {**again, "_states": ["RUNNING", "RUNNING"], "_workflow": None}
        return backend.answer(status, json.dumps({"message": "planted"}).encode())

    backend.api.interfere = fails
    command = ["kfp", "heal", "--within", "1e6", "--json"]
    codes = [CliRunner().invoke(app, command).exit_code for _ in range(3)]
    assert failures
    assert codes[-1] == 0
    goes_on = [run for run in backend.api.runs.values() if run["state"] in ("PENDING", "RUNNING", "SUCCEEDED")]
    assert len(goes_on) == 1
    done = [path for _, path in backend.api.requests if path.endswith(":retry")]
    assert len(done) <= 1 + (step == "retry") + step.startswith("submission")


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("with_store", [True, False])
def test_who_waits_for_a_run_follows_the_one_that_was_submitted_without_an_answer(
    with_store: bool, status: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heal, "CLAIM_S", 0.0)
    backend.api.retry_fails = True
    run_id = backend.add("pod-lost-failed")
    if not with_store:
        backend.api.runs[run_id]["runtime_config"]["parameters"]["store"] = "folder-of-the-pod"

    def fails(method: str, path: str) -> Any:
        if (method, path) != ("POST", "/apis/v2beta1/runs") or "new" in backend.api.runs:
            return None
        again = {**backend.api.runs[run_id], "state": "PENDING", "run_id": "new", "created_at": now()}
        backend.api.runs["new"] = {**again, "_states": ["RUNNING", "RUNNING"], "_workflow": None}
        return backend.answer(status, b'{"message": "planted"}')

    backend.api.interfere = fails
    client = connection.connect(backend.api.url)
    decision = heal.until_decided(client, run_id, None, Policy(3, needs_store=False), 0)
    if status == 500:  # the API's own word that it failed
        assert decision.action is Action.LEFT
    else:
        assert (decision.action, decision.run_id) == (Action.REPLACED, "new")
    assert backend.submissions() == 1


def test_an_error_that_lasts_is_told_and_starts_nothing(backend: Backend) -> None:
    backend.add("pod-lost-failed")
    backend.api.retry_fails = True
    refused = backend.answer(403, b'{"message": "RBAC: access denied"}')
    backend.api.interfere = lambda method, path: refused if (method, path[-5:]) == ("POST", "/runs") else None
    done = CliRunner().invoke(app, ["kfp", "heal", "--within", "1e6"])
    assert done.exit_code == 1
    assert "left alone: train chunk 2 was lost" in done.stdout
    assert "RBAC: access denied" in done.stdout


def test_without_its_store_a_run_is_left_by_who_does_not_watch_it(backend: Backend) -> None:
    run_id = backend.add("pod-lost-failed")
    backend.api.runs[run_id]["runtime_config"]["parameters"]["store"] = "folder-of-the-pod"
    decision = backend.look(run_id)
    assert decision.action is Action.LEFT
    assert decision.error
    assert backend.retries() == 0
    assert backend.look(run_id, Policy(3, needs_store=False)).action is Action.RETRIED
    assert backend.retries() == 1


# a round


def test_a_round_heals_what_is_lost_and_tells_a_line_for_each_failed_run(backend: Backend, kfp_api: Any) -> None:
    lost = backend.add("pod-lost-failed", **ended(*LOST))
    backend.add("gpu-promised", **ended(*LOST))
    backend.add("api-away", **ended(*LOST, seconds=25 * 3600))  # yesterday's
    backend.add("toy-exits-not-retried", **ended(*LOST))  # somebody else's pipeline
    backend.add("succeeded")
    done = CliRunner().invoke(app, ["kfp", "heal"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 2, lines
    assert any(line.startswith(f"lost ({lost}): started again: train chunk 2 was lost") for line in lines)
    assert any("left alone: train chunk 1 failed by itself" in line for line in lines)
    assert [path for _, path in kfp_api.requests if path.endswith(":retry")] == [f"/apis/v2beta1/runs/{lost}:retry"]


def test_the_report_shows_what_was_lost(backend: Backend) -> None:
    backend.look(backend.add("pod-lost-failed"))
    run = Run(Storage(str(backend.store)), "lost")
    (loss,) = run.lost_pods()
    assert (loss.stage, loss.reason, loss.number, loss.of) == ("train chunk 2", "main: Error (exit code 137)", 1, 3)
    bare = RunReport(run="lost", uri=run.uri, created=now(), recipe_name="", recipe_yaml="", method="sft")
    title = "Pods lost, and Kubeflow's run started again: 1"
    assert title not in render(bare)
    page = render(replace(bare, lost_pods=run.lost_pods()))
    assert title in page
    assert "main: Error (exit code 137)" in page


@pytest.mark.parametrize("kind", ["sweep", "retrain"])
def test_pages_of_sweeps_and_retrainings_show_what_was_lost(kind: str, backend: Backend) -> None:
    store = Storage(str(backend.store))
    run_id = backend.add("pod-lost-failed")
    remote = backend.api.runs[run_id]
    spec = backend.api.spec(remote)
    spec = spec.get("pipeline_spec", spec)
    inputs, given = spec["root"]["inputDefinitions"]["parameters"], remote["runtime_config"]["parameters"]
    name, named = given.pop("run_name", "lost"), inputs.pop("run_name")
    spec["pipelineInfo"]["name"] = f"lost-{kind}"
    trained: Run | Sweep
    if kind == "sweep":
        inputs["sweep_name"], given["sweep_name"] = named, name
        trained = Sweep(store, name)
    else:  # its lock is released when the run ends; another retraining has begun since
        lock = RetrainLock(store, "lost", run_id)
        assert lock.acquire(wait=False, expires_s=60)
        lock.note_runs(["lost-0007"])
        lock.release()
        assert RetrainLock(store, "lost", "later").acquire(wait=False, expires_s=60)
        trained = Run(store, "lost-0007")
    assert backend.look(run_id).action is Action.RETRIED
    (loss,) = trained.lost_pods()
    assert (loss.stage, loss.number, loss.of, loss.kubeflow_run) == ("train chunk 2", 1, 3, run_id)


def test_a_healer_fits_its_pod() -> None:
    """100 MiB, see `tests/manifests/test_heal.py`: kfp's client alone would take them with all of `kubernetes`."""
    script = """
import re, sys
from baton.cli import app
from baton.kubeflow import heal
from baton.store.storage import Storage
Storage("s3://bucket")
assert not [name for name in sys.modules if name.partition(".")[0] in ("kubernetes", "torch")]
print(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
from kubernetes.client import CoreV1Api
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80 * 1024


PLACED = {"zone": "a", "karpenter.sh/capacity-type": "on-demand"}
PLAN = Plan(rows=8000, steps_per_epoch=1000, num_steps=1000, targets=(500, 1000))


def _waiting(
    backend: Backend,
    *,
    waits: bool = True,
    chunk: int = 1,
    note: tuple[int, float, float] | None = None,
    left_s: float = 36_000,
) -> str:
    """Adds the recorded run whose chunk waits for a node, with a pipeline of `capacity: spot-first` and its store.

    A note is of a step, some seconds after the first chunk's begin and some seconds ago.
    """
    recording = recorded("waits-for-memory" if waits else "running")
    text = json.dumps(recording).replace("train-chunk", "train-chunk-placed")
    recording = json.loads(text.replace("train chunk 1", f"train chunk {chunk}"))
    run = recording["run"]
    (run["pipeline_spec"].get("pipeline_spec") or run["pipeline_spec"])["root"]["inputDefinitions"]["parameters"][
        "nodes"
    ] = {"parameterType": "STRUCT", "isOptional": True}
    run.setdefault("runtime_config", {}).setdefault("parameters", {})["store"] = str(backend.store)
    run_id = str(backend.api.add_recorded(run, recording["workflow"], {}))
    training = backend.training(run_id)
    by = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=left_s)
    document = {
        "name": "t",
        "model": {"base": "m"},
        "data": {"source": "r.jsonl"},
        "training": {"method": "sft", "max_steps": 1000, "batch_size": 8},
        "chunks": {"count": 2, "checkpoint_every": 10},
        "budget": {"by": by.isoformat(), "reserve": "60s"},
        "resources": {"capacity": "spot-first", "node_selector": {"zone": "a"}},
    }
    training.create(load.validate(document, origin="r.yaml"))
    training.write(PLAN)
    if note:
        step, began_s, at_s = note
        started, at = time.time() - began_s, ago(at_s)
        training.write(Progress(step=step, seconds_per_step=20.0, started=started, at=at, start_seconds=60.0))
    return run_id


@pytest.mark.parametrize(
    ("case", "action"),
    [
        # 14,000 s of work are left, and 36,000 s.
        ({"note": (300, 18_000, 600)}, Action.GAVE_WAY),  # behind uniform progress
        ({"note": (300, 18_000, 60)}, None),  # but the machine was lost a minute ago
        ({"note": (300, 3_600, 600)}, None),
        ({"note": (990, 3_600, 600), "left_s": 400}, Action.GAVE_WAY),  # ahead, and late
        ({}, Action.GAVE_WAY),  # five days before the first step
        ({"note": (300, 18_000, 600), "waits": False}, None),
    ],
)
def test_a_run_that_waits_too_long_for_spot_goes_on_demand(
    case: dict[str, Any], action: Action | None, backend: Backend
) -> None:
    run_id = _waiting(backend, **case)
    client = connection.connect(backend.api.url)
    decision = heal.give_way(client, client.get_run(run_id), None)
    assert (decision and decision.action) == action
    assert backend.submissions() == (decision is not None)
    cancelled = [path for _, path in backend.api.requests if path.endswith(f"{run_id}:terminate")]
    assert len(cancelled) == (decision is not None)
    if decision:
        newer = client.get_run(decision.run_id)
        assert newer.parameters["nodes"] == PLACED
        assert newer.parameters["store"] == str(backend.store)
        assert heal.successor(client, run_id, None) == decision.run_id


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_run_that_waits_for_on_demand_nodes_waits(chunk: int, backend: Backend) -> None:
    run_id = _waiting(backend, chunk=chunk)
    if chunk == 1:
        backend.api.runs[run_id]["runtime_config"]["parameters"]["nodes"] = PLACED
    else:
        backend.training(run_id).write(NodeChoice(chunk=2, nodes=PLACED))
    client = connection.connect(backend.api.url)
    assert heal.give_way(client, client.get_run(run_id), None) is None
    if chunk == 2:
        backend.training(run_id).write(NodeChoice(chunk=2, nodes={"zone": "a", "karpenter.sh/capacity-type": "spot"}))
        assert heal.give_way(client, client.get_run(run_id), None)


def test_a_run_of_another_capacity_waits(backend: Backend) -> None:
    run_id = backend.add("waits-for-memory")
    client = connection.connect(backend.api.url)
    assert heal.give_way(client, client.get_run(run_id), None) is None


def test_one_healer_submits_a_run_that_gives_way(backend: Backend) -> None:
    run_id = _waiting(backend)
    client = connection.connect(backend.api.url)
    run = client.get_run(run_id)
    claims = heal._Starts(Storage(str(backend.store)), run_id)
    assert claims.claim({}, run.num_ends + 1) == 0
    waiting = heal.give_way(client, run, None)
    assert waiting
    assert (waiting.action, backend.submissions()) == (Action.WAITS, 0)


@pytest.mark.parametrize("retries", [0, 1])
def test_who_waits_for_a_run_follows_it_on_demand(retries: int, backend: Backend) -> None:
    run_id = _waiting(backend)
    submission = submit.Submission(run_id=run_id, run_name="t", url="")
    hours = 20 / 3600 if retries else 1 / 3600
    with follow.console.capture() as told:
        ended = follow.with_retries(backend.api.url, None, submission, hours=hours, retries=retries)
    if not retries:  # it may only watch
        assert (ended["state"], ended["run_id"], backend.submissions()) == ("unknown", run_id, 0)
        return
    assert (ended["state"], backend.submissions()) == ("succeeded", 1)
    assert ended["run_id"] != run_id
    assert backend.api.runs[ended["run_id"]]["runtime_config"]["parameters"]["nodes"] == PLACED
    assert "t: continues on demand: train chunk 1 waits for spot nodes" in told.get()


def test_a_healer_ends_what_another_has_left_of_a_run_that_gave_way(backend: Backend) -> None:
    """It ended between the submission and the cancellation."""
    run_id = _waiting(backend)
    client = connection.connect(backend.api.url)
    run = client.get_run(run_id)
    newer = client.start_again(run, heal._parameters(run, client.specification(run)))
    decision = heal.give_way(client, run, None)
    assert decision
    assert (decision.action, decision.run_id, backend.submissions()) == (Action.GAVE_WAY, newer, 1)
    assert client.get_run(run_id).state == "CANCELING"
