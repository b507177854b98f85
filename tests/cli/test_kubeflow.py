"""`baton submit --wait`, `status`, `cancel` and `retry` with kfp's client, against the API's model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.display import console
from baton.kubeflow import heal
from baton.kubeflow import submit as kubeflow
from baton.recipe import load
from baton.runs.documents import TrackingRun
from baton.runs.outcomes import RunFailure
from baton.runs.run import Run, now
from baton.store.storage import Storage

BATON = str(Path(sys.executable).parent / "baton")
ROOT = Path(__file__).parents[2]
GATED = ["--set", "evaluation.gate={loss: '<= 3.0'}", "--chunks", "3"]
LOG = """[KFP Executor 2024-05-01 12:00:01,000 INFO]: stage stage=train chunk 2 state=started
[KFP Executor 2024-05-01 12:00:40,000 ERROR]: store 's3://baton': access denied. Check the policy of the key.
"""


@dataclass(frozen=True)
class Done:
    """What a command ended with."""

    returncode: int
    stdout: str
    stderr: str


Baton = Callable[..., Done]


@pytest.fixture
def baton(kfp_api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Baton:
    """Runs a command in this process, with the endpoint in its environment."""
    monkeypatch.setattr(kubeflow, "POLL_S", 0.01)
    monkeypatch.setattr(heal, "PAUSE_S", 0.0)
    monkeypatch.setattr(console, "width", 200)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BATON_KFP_ENDPOINT", kfp_api.url)

    def run(*arguments: str) -> Done:
        seen = io.StringIO()
        monkeypatch.setattr(console, "file", seen)
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return Done(done.exit_code, done.stdout, seen.getvalue() + done.stderr)

    return run


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled recipe with three chunks and a gate."""
    path = tmp_path_factory.mktemp("compiled") / "quickstart.yaml"
    recipe = str(ROOT / "pipelines/recipes/quickstart.yaml")
    done = subprocess.run(
        [BATON, "compile", recipe, "-o", str(path), *GATED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def started(kfp_api: Any, package: Path, submit_to: Any) -> Callable[..., str]:
    """Starts a run and lets it come to a state, and returns its id."""

    def start(state: str, *, name: str = "mine", stops_at: str | None = None) -> str:
        kfp_api.stops_at = stops_at
        run_id = submit_to(kfp_api.url, package, run_name=name, arguments={"run_name": name}).run_id
        kfp_api.runs[run_id].update(state=state, _states=[])
        return str(run_id)

    return start


def stages(done: Done) -> dict[str, str]:
    return {stage["name"]: stage["state"] for stage in json.loads(done.stdout)["stages"]}


# submit --wait

RECIPE = str(ROOT / "pipelines/recipes/quickstart.yaml")
PARAMETERS = {
    "run_name": "mine", "store": "s3://baton", "source": "builtin:stdlib-docs", "learning_rate": 0.002, "epochs": 0.0,
    "max_steps": 240, "base_model": "", "seed": 7, "batch_size": 16,
}  # fmt: skip
SUBMIT = ("submit", RECIPE, "--run", "mine", "--store", "s3://baton", *GATED, "--wait", "--output", "json")


@pytest.mark.parametrize(
    ("verdict", "code", "state", "left_out"),
    [("accepted", 0, "succeeded", "rejected"), ("rejected", 3, "rejected", "export")],
)
def test_submit_tells_each_stage_and_what_the_gate_said(
    verdict: str, code: int, state: str, left_out: str, kfp_api: Any, baton: Baton
) -> None:
    kfp_api.verdict = verdict
    done = baton(*SUBMIT)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["state"] == state
    lines = done.stderr.splitlines()
    told = [line for line in lines if line.startswith(("✓", "–", "✗"))]
    assert told[:3] == ["✓ data split (42 s)", "✓ tokenize (42 s)", "✓ train chunk 1 (42 s)"]
    assert f"– {left_out} (skipped)" in told
    assert told[-1] == "✓ report (42 s)"
    assert len(told) == len(set(told)) == 13


@pytest.mark.parametrize(("final", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_submit_waits_and_tells_the_true_state(final: str, code: int, kfp_api: Any, baton: Baton) -> None:
    kfp_api.final_state = final
    done = baton(*SUBMIT)
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    (run,) = kfp_api.runs.values()
    assert {key: found[key] for key in ("run", "run_id", "state", "url")} == {
        "run": "mine", "run_id": run["run_id"], "state": final.lower(),
        "url": f"{kfp_api.url}/#/runs/details/{run['run_id']}",
    }  # fmt: skip
    assert run["runtime_config"]["parameters"] == PARAMETERS
    tasks = kfp_api.spec(run)["pipeline_spec"]["root"]["dag"]["tasks"]
    cached = {key for key, task in tasks.items() if task.get("cachingOptions") == {"enableCache": True}}
    assert cached == {"tokenize", "train-chunk", "train-chunk-2"}


def test_submit_says_where_its_pipeline_is_and_leaves_it_unregistered_where_asked(kfp_api: Any, baton: Baton) -> None:
    without_wait = [word for word in SUBMIT if word != "--wait"]
    for known in ("new", "unchanged"):
        done = baton(*without_wait)
        assert done.returncode == 0, done.stderr
        (version,) = kfp_api.registry.versions.values()
        shown = json.loads(done.stdout)
        assert (shown["pipeline"], shown["version"]) == ("quickstart", version["name"])
        page = f"#/pipelines/details/{version['pipeline_id']}/version/{version['pipeline_version_id']}"
        assert f"pipeline, {known}: {kfp_api.url}/{page}" in done.stderr
    done = baton(*without_wait, "--no-register")
    assert done.returncode == 0, done.stderr
    assert "pipeline" not in json.loads(done.stdout)
    assert ["pipeline_spec" in run for run in kfp_api.runs.values()] == [False, False, True]


def test_submit_says_which_stage_failed_and_why(kfp_api: Any, baton: Baton) -> None:
    kfp_api.final_state, kfp_api.stops_at = "FAILED", "train-chunk-2"
    kfp_api.messages, kfp_api.logs = {"train-chunk-2": "Error (exit code 1)"}, {"train-chunk-2": LOG}
    done = baton(*SUBMIT)
    said = "store 's3://baton': access denied. Check the policy of the key."
    assert done.returncode == 1
    assert json.loads(done.stdout)["failed"] == [{"stage": "train chunk 2", "message": said, "exit_code": None}]
    assert f"✗ train chunk 2 (42 s): {said}" in done.stderr
    assert "kubectl logs w-abc-retry-system-container-impl-" in done.stderr


def test_submit_says_what_a_stage_has_left_for_kubernetes(kfp_api: Any, baton: Baton) -> None:
    """The logs of a single-user Kubeflow cannot be had; the launcher exits with 1 whatever the stage exits with."""
    kfp_api.final_state, kfp_api.stops_at = "FAILED", "data-split"
    said = "data.source 'rows/*.jsonl' matches no file. Give a file, a folder or a glob that does."
    kfp_api.messages = {"data-split": f"main: Error (exit code 1): {said} (baton exit code 2)"}
    done = baton(*SUBMIT)
    assert done.returncode == 1
    assert json.loads(done.stdout)["failed"] == [{"stage": "data split", "message": said, "exit_code": 2}]
    assert f"✗ data split (42 s): {said}\n" in done.stderr


@pytest.mark.parametrize("backend_can", [True, False], ids=["retried", "submitted again"])
def test_a_run_whose_pod_was_lost_starts_again(backend_can: bool, kfp_api: Any, baton: Baton) -> None:
    """By the API where the backend still has the workflow's nodes, else by the same name once more."""
    kfp_api.final_state, kfp_api.stops_at = "FAILED", "train-chunk-2"
    kfp_api.messages = {"train-chunk-2": "main: Error (exit code 137)"}
    kfp_api.retry_fails = not backend_can
    failed = []

    def mends_after(method: str, path: str) -> None:
        if path.endswith(":retry") or (method == "POST" and path.endswith("/runs")):
            failed.append(path)
        if len(failed) == 2:  # it was submitted, and is started again
            kfp_api.final_state, kfp_api.stops_at = "SUCCEEDED", None

    kfp_api.interfere = mends_after
    done = baton(*SUBMIT, "--retries", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "succeeded"
    how = "started" if backend_can else "submitted"
    told = f"mine: {how} again: train chunk 2 was lost (main: Error (exit code 137)); start 1 of 2"
    assert told in done.stderr
    assert len(kfp_api.runs) == (1 if backend_can else 2)
    assert json.loads(done.stdout)["run_id"] == list(kfp_api.runs)[-1]
    assert {run["runtime_config"]["parameters"]["run_name"] for run in kfp_api.runs.values()} == {"mine"}


def test_a_resubmission_outlives_a_cleaner_of_temporary_folders(
    kfp_api: Any, baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A week may lie between a submission and the one that its lost pod asks for."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kfp_api.final_state, kfp_api.stops_at, kfp_api.retry_fails = "FAILED", "train-chunk-2", True
    kfp_api.messages = {"train-chunk-2": "main: Error (exit code 137)"}
    emptied = []

    def cleans(method: str, path: str) -> None:
        if path.endswith(":retry"):
            emptied.append(len(list(temporary.iterdir())))
            for each in temporary.iterdir():
                shutil.rmtree(each)
            kfp_api.final_state, kfp_api.stops_at = "SUCCEEDED", None

    kfp_api.interfere = cleans
    done = baton(*SUBMIT, "--retries", "1")
    assert done.returncode == 0, done.stderr
    assert emptied == [0], "nothing has to last"
    first, second = (kfp_api.spec(run) for run in kfp_api.runs.values())
    assert first == second


@pytest.mark.parametrize(
    ("message", "starts"),
    [
        ("main: Error (exit code 143)", 3),
        ("main: Error (exit code 1)", 3),
        ("main: OOMKilled (exit code 1)", 1),
        ("main: Error (exit code 1): a row is damaged. (baton exit code 2)", 1),
    ],
    ids=["lost", "launcher", "memory", "user"],
)
def test_what_is_started_again(message: str, starts: int, kfp_api: Any, baton: Baton) -> None:
    kfp_api.final_state, kfp_api.stops_at = "FAILED", "train-chunk-2"
    kfp_api.messages = {"train-chunk-2": message}
    done = baton(*SUBMIT, "--retries", "2")
    assert done.returncode == 1
    retried = [path for method, path in kfp_api.requests if path.endswith(":retry")]
    assert 1 + len(retried) == starts
    assert json.loads(done.stdout)["state"] == "failed"


def test_submit_without_cache_with_an_account_and_a_page(
    kfp_api: Any, baton: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kubeflow.test/pipeline")
    assert baton(*SUBMIT[:-3], "--no-cache", "--service-account", "baton-runner").returncode == 0
    (run,) = kfp_api.runs.values()
    assert run["service_account"] == "baton-runner"
    spec = kfp_api.spec(run)["pipeline_spec"]
    assert {str(task["cachingOptions"]) for task in spec["root"]["dag"]["tasks"].values() if "train" in str(task)} == {
        "{}"
    }
    for executor in spec["deploymentSpec"]["executors"].values():
        page = {"name": "KF_PIPELINES_UI_ENDPOINT", "value": "https://kubeflow.test/pipeline"}
        assert page in executor["container"]["env"]


# status


@pytest.mark.parametrize("by", ["name", "id"])
def test_status_of_a_run_that_goes_on(by: str, started: Any, baton: Baton) -> None:
    run_id = started("RUNNING", stops_at="train-chunk-2")
    done = baton("status", "mine" if by == "name" else run_id, "--output", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "running"
    assert list(stages(done).items()) == [
        ("data split", "succeeded"),
        ("tokenize", "succeeded"),
        ("train chunk 1", "succeeded"),
        ("checkpoint 1", "succeeded"),
        ("train chunk 2", "running"),
        ("checkpoint 2", "waiting"),
        ("train chunk 3", "waiting"),
        ("checkpoint 3", "waiting"),
        ("evaluate", "waiting"),
        ("gate", "waiting"),
        ("export", "waiting"),
        ("rejected", "waiting"),
        ("report", "waiting"),
    ]


@pytest.mark.parametrize(
    ("recipe", "more", "stops_at", "told"),
    [
        (
            "pipelines/recipes/quickstart.yaml",
            ("--chunks", "20"),
            "train-chunk-17",
            {"train chunk 1": "succeeded", "checkpoint 16": "succeeded", "train chunk 17": "running"}
            | {"checkpoint 17": "waiting", "train chunk 18": "waiting", "checkpoint 20": "waiting"},
        ),
        (
            "tests/recipes/phases.yaml",
            (),
            "sft-train-chunk-2",
            {"pretrain: train chunk 1": "succeeded", "pretrain: export": "succeeded", "sft: data split": "succeeded"}
            | {"sft: train chunk 1": "succeeded", "sft: train chunk 2": "running", "sft: export": "waiting"},
        ),
    ],
    ids=["groups", "phases"],
)
def test_status_of_graphs_inside_a_pipeline(
    recipe: str,
    more: tuple[str, ...],
    stops_at: str,
    told: dict[str, str],
    kfp_api: Any,
    submit_to: Any,
    baton: Baton,
    tmp_path: Path,
) -> None:
    path = tmp_path / "pipeline.yaml"
    assert baton("compile", str(ROOT / recipe), "-o", str(path), "--store", "s3://baton", *more).returncode == 0
    kfp_api.stops_at = stops_at
    run_id = submit_to(kfp_api.url, path, run_name="mine", arguments={"run_name": "mine"}).run_id
    kfp_api.runs[run_id].update(state="RUNNING", _states=[])
    found = stages(baton("status", "mine", "--output", "json"))
    assert {name: found[name] for name in told} == told


def test_status_in_words(started: Any, baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "baton-store").mkdir()  # the pods' store is another folder of this name
    started("FAILED", stops_at="train-chunk-2")
    done = baton("status", "mine")
    assert not list((tmp_path / "baton-store").iterdir())
    assert "baton-store is a folder of the pod's own" in done.stderr
    assert done.returncode == 1
    assert "mine: failed" in done.stdout
    assert re.search(r"^(train chunk 3 +|checkpoint 2–3 +)not run", done.stdout, re.MULTILINE)
    assert "/#/runs/details/" in done.stdout


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("OOMKilled (exit code 137)", "raise resources.memory"),
        ('ImagePullBackOff: Back-off pulling image "registry/baton:1"', "check resources.image"),
        ('CreateContainerConfigError: secret "s3-keys" not found', "see resources.secret"),
        ("Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "check resources.gpus"),
        ("pod deleted", "`baton retry` resumes from the newest checkpoint"),
        ("Error: container has runAsNonRoot and image will run as root", "The image runs as root"),
    ],
    ids=["memory", "image", "secret", "node", "deleted", "root"],
)
@pytest.mark.parametrize("state", ["RUNNING", "FAILED"])
def test_status_says_what_helps(state: str, message: str, hint: str, kfp_api: Any, started: Any, baton: Baton) -> None:
    kfp_api.messages = {"train-chunk": message}
    started(state, stops_at="train-chunk")
    done = baton("status", "mine", "--output", "json")
    (stage,) = [stage for stage in json.loads(done.stdout)["stages"] if stage["name"] == "train chunk 1"]
    assert stage["message"] == message
    assert hint in done.stderr
    assert done.returncode == (state == "FAILED")


def test_status_without_the_first_version_of_the_api(kfp_api: Any, started: Any, baton: Baton) -> None:
    kfp_api.serves_first_version = False
    run_id = started("FAILED", stops_at="train-chunk-2")
    done = baton("status", "mine", "--output", "json")
    assert done.returncode == 1
    assert stages(done)["train chunk 2"] == "failed"
    assert f"kubectl logs -l pipeline/runid={run_id},app.kubernetes.io/component=train-chunk -c main" in done.stderr


def test_status_of_a_run_whose_version_may_not_be_read(kfp_api: Any, started: Any, baton: Baton) -> None:
    run_id = started("RUNNING", stops_at="train-chunk-2")
    kfp_api.registry.multi_user, kfp_api.registry.forbidden = True, {"get"}
    done = baton("status", run_id, "--output", "json", "--namespace", "team")
    assert done.returncode == 0, done.stderr
    assert stages(done)["train-chunk"] == "succeeded"
    assert stages(done)["train-chunk-2"] == "running"
    assert "executor" not in stages(done)


def test_status_of_several_runs_of_one_name_is_the_newest_ones(started: Any, baton: Baton) -> None:
    started("FAILED")
    newest = started("SUCCEEDED")
    done = baton("status", "mine", "--output", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["run_id"] == newest
    assert f"2 runs are named mine; this is the newest, {newest}" in done.stderr


def test_status_follows_to_the_end(kfp_api: Any, started: Any, baton: Baton) -> None:
    run_id = started("RUNNING")
    kfp_api.runs[run_id]["_states"] = ["SUCCEEDED"]
    done = baton("status", "mine", "--wait", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "succeeded"


# cancel and retry


def test_cancel_and_go_on(kfp_api: Any, started: Any, baton: Baton) -> None:
    run_id = started("RUNNING", stops_at="train-chunk-2")
    cancelled = baton("cancel", "mine", "--output", "json")
    assert cancelled.returncode == 0, cancelled.stderr
    assert json.loads(cancelled.stdout)["state"] == "canceling"
    ended = baton("status", "mine", "--wait", "--output", "json")
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["state"] == "canceled"

    kfp_api.stops_at = None
    retried = baton("retry", run_id, "--wait", "--output", "json")
    assert retried.returncode == 0, retried.stderr
    assert json.loads(retried.stdout)["state"] == "succeeded"
    assert ("POST", f"/apis/v2beta1/runs/{run_id}:retry") in kfp_api.requests


@pytest.fixture
def tracked_run(kfp_api: Any, package: Path, submit_to: Any, tmp_path: Path) -> Run:
    """A run that trains its second chunk, tracked in a real MLflow."""
    run = Run(Storage(str(tmp_path / "store")), "mine")
    run.create(load.load(RECIPE, [f"store.uri={tmp_path}/store"]))
    server = f"sqlite:///{tmp_path}/mlflow.db"
    tracked = mlflow.MlflowClient(server).create_run("0", run_name="mine")
    run.write(TrackingRun(mlflow=server, run_id=tracked.info.run_id, experiment_id="0"))
    arguments = {"run_name": "mine", "store": str(tmp_path / "store")}
    kfp_api.stops_at = "train-chunk-2"
    run_id = submit_to(kfp_api.url, package, run_name="mine", arguments=arguments).run_id
    kfp_api.runs[run_id].update(state="RUNNING", _states=[], created_at=now())
    return run


def _state_in_mlflow(run: Run) -> str:
    tracking = run.need(TrackingRun)
    return str(mlflow.MlflowClient(tracking.mlflow).get_run(tracking.run_id).info.status)


def test_cancel_leaves_a_page_and_ends_the_tracking_run(tracked_run: Run, baton: Baton) -> None:
    done = baton("cancel", "mine")
    assert f"why it ended: {tracked_run.uri}/report.html" in done.stderr
    failure = tracked_run.need(RunFailure)
    assert (failure.stage, failure.is_cancelled, failure.exit_code) == ("train chunk 2", True, None)
    page = Path(tracked_run.uri, "report.html").read_text()
    assert "The run was canceled in train chunk 2, before the first step." in page
    assert _state_in_mlflow(tracked_run) == "KILLED"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("status", "mine", "--wait"), ("status", "mine"), ("retry", "mine")])
def test_who_meets_a_lost_pod_leaves_a_page(
    command: tuple[str, ...], tracked_run: Run, kfp_api: Any, baton: Baton
) -> None:
    for run in kfp_api.runs.values():
        run.update(state="FAILED", _states=[])
    kfp_api.messages = {"train-chunk-2": "main: Error (exit code 137)"}
    kfp_api.retry_fails = True
    assert baton(*command).returncode == 1
    failure = tracked_run.need(RunFailure)
    assert (failure.stage, failure.message) == ("train chunk 2", "main: Error (exit code 137)")
    assert str(failure.remedy).startswith("The machine was preempted")
    assert _state_in_mlflow(tracked_run) == "FAILED"


@pytest.mark.parametrize(
    ("command", "state", "message"),
    [
        ("stop", "SUCCEEDED", "run 'mine' is succeeded already; expected one that still runs."),
        ("retry", "RUNNING", "run 'mine' is running; expected one that has failed or was canceled."),
        ("retry", "SUCCEEDED", "run 'mine' is succeeded; expected one that has failed or was canceled."),
    ],
)
def test_what_has_ended_or_not(command: str, state: str, message: str, started: Any, baton: Baton) -> None:
    started(state)
    done = baton(command, "mine")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [f"baton: {message}"]


def test_a_retry_that_the_backend_cannot_do(kfp_api: Any, started: Any, baton: Baton) -> None:
    kfp_api.retry_fails = True
    started("FAILED")
    done = baton("retry", "mine")
    assert done.returncode == 1
    assert "offloaded node status" in done.stderr
    assert "`baton kfp submit RECIPE --run mine` starts it again from its newest checkpoint." in done.stderr


@pytest.mark.parametrize("command", ["status", "cancel", "retry"])
def test_a_run_that_is_not_there(command: str, kfp_api: Any, baton: Baton) -> None:
    done = baton(command, "nobody")
    assert done.returncode == 2
    assert f"'{kfp_api.url}' has no run named 'nobody'" in done.stderr
    assert "Traceback" not in done.stderr


def test_several_profiles_ask_for_a_namespace(kfp_api: Any, started: Any, baton: Baton) -> None:
    kfp_api.registry.multi_user = True
    started("SUCCEEDED")
    done = baton("status", "mine")
    assert done.returncode == 2
    assert "--namespace" in done.stderr
    assert baton("status", "mine", "--namespace", "ann").returncode == 0


def test_an_endpoint_must_be_named(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "ENDPOINT" not in name}
    environment["XDG_CACHE_HOME"] = str(tmp_path)  # other tests begin runs of this name
    done = subprocess.run(
        [BATON, "status", "mine"], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert "--endpoint" in done.stderr


def test_the_package_names_every_task_only_once(package: Path) -> None:
    spec = next(yaml.safe_load_all(package.read_text()))
    dags = [spec["root"]["dag"], *(part["dag"] for part in spec["components"].values() if "dag" in part)]
    keys = [key for dag in dags for key in dag["tasks"]]
    assert len(keys) == len(set(keys))


@pytest.mark.slow
def test_a_terminal_shows_one_live_line(kfp_api: Any, started: Any, tmp_path: Path) -> None:
    run_id = started("RUNNING", stops_at="train-chunk-2")
    kfp_api.runs[run_id]["_states"] = ["RUNNING", "SUCCEEDED"]
    ours, theirs = os.openpty()
    environment = {**os.environ, "HOME": str(tmp_path), "BATON_KFP_ENDPOINT": kfp_api.url, "TERM": "xterm"}
    command = [BATON, "status", "mine", "--wait"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b"".join(_read(ours)).decode()
    assert process.returncode == 0
    assert "train chunk 2" in shown
    assert "4/13" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def _read(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # what Linux says when the other side is closed
        while chunk := os.read(terminal, 65536):
            yield chunk


# doctor


def checks(done: Done) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.parametrize(
    ("strategy", "state", "found"),
    [
        (
            {"limit": "2", "retryPolicy": "OnError"},
            "note",
            "a killed or evicted pod, or a shut-down node",
        ),
        ({"limit": "2", "retryPolicy": "OnFailure"}, "note", "a pod that was deleted ends the run there"),
        ({"retryPolicy": "Always", "expression": "asInt(lastRetry.exitCode) in [137, 143]"}, "ok", "start again"),
        (None, "ok", "start again"),
    ],
    ids=["stock", "on failure", "retry-lost-pods", "none"],
)
def test_doctor_says_which_losses_end_a_run(
    strategy: dict[str, str] | None, state: str, found: str, kfp_api: Any, started: Any, baton: Baton, tmp_path: Path
) -> None:
    started("SUCCEEDED")
    kfp_api.retry_strategy = strategy
    seen = checks(baton("doctor", "--store", str(tmp_path), "--endpoint", kfp_api.url, "--output", "json"))
    assert seen["lost pods"]["state"] == state
    assert seen["lost pods"]["found"].startswith(found)
    assert ("retry-lost-pods" in seen["lost pods"]["remedy"]) == (state == "note")
    assert seen["kubeflow"]["state"] == "ok"
    assert seen["pipelines"]["found"] == "can be registered; 1 are"


def test_doctor_of_an_installation_that_does_not_answer(baton: Baton, tmp_path: Path) -> None:
    done = baton("doctor", "--store", str(tmp_path), "--endpoint", "http://127.0.0.1:9", "--output", "json")
    assert done.returncode == 1
    assert checks(done)["kubeflow"]["state"] == "problem"
    assert "takes no connection" in checks(done)["kubeflow"]["found"]
