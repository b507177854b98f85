"""What a run on Kubeflow leaves running in MLflow is ended by whoever looks at it next; against a real server."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.display import console
from baton.kubeflow import submit as kubeflow
from baton.kubeflow.submit import submit
from baton.recipe import load
from baton.runs.documents import TrackingRun
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.tracking import tracking_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BATON = str(Path(sys.executable).parent / "baton")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an MLflow server."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("mlflow")), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=10):
                    break
            except OSError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


class Started:
    """A run on Kubeflow, and the training runs of its stages, tracked as they track themselves."""

    def __init__(self, api: Any, package: Path, uri: str, store: Path, patch: pytest.MonkeyPatch) -> None:
        self.api, self.package, self.patch, self.uri = api, package, patch, uri
        self.storage = Storage(str(store))
        self.client = mlflow.MlflowClient(uri)

    def submit(self) -> str:
        return submit(str(self.package), self.api.url, experiment="e", run_name="mine", arguments={}).run_id

    def train(self, kubeflow_run: str, name: str) -> Run:
        """Does what the first stage does in its pod."""
        settings = {"tracking.mlflow": self.uri, "name": "quickstart"}
        recipe = load.load(
            str(ROOT / "pipelines/recipes/quickstart.yaml"), [f"{path}={value}" for path, value in settings.items()]
        )
        run = Run(self.storage, name)
        run.create(recipe)
        with self.patch.context() as inside:
            inside.setenv("KFP_RUN_ID", kubeflow_run)
            tracking_run.start(run, recipe)
        return run

    def status(self, run: Run) -> str:
        return str(self.client.get_run(run.need(TrackingRun).run_id).info.status)

    def ends(self, run_id: str, state: str, *, cancelled: bool = False) -> None:
        self.api.runs[run_id].update(state=state, _states=[], _cancelled=cancelled)


def _compiled(folder: Path, uri: str, **settings: str) -> Path:
    package = folder / "pipeline.yaml"
    command = [BATON, "compile", str(ROOT / "pipelines/recipes/quickstart.yaml"), "-o", str(package)]
    for path, value in {"tracking.mlflow": uri, "name": "quickstart", **settings}.items():
        command += ["--set", f"{path}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return package


@pytest.fixture
def started(kfp_api: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(kfp_api, _compiled(tmp_path, server), server, tmp_path / "store", monkeypatch)


@pytest.fixture
def baton(kfp_api: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs a command in this process and returns its exit code and what it says."""
    monkeypatch.setattr(kubeflow, "POLL_S", 0.01)
    monkeypatch.setattr(console, "width", 200)
    monkeypatch.setenv("BATON_KFP_ENDPOINT", kfp_api.url)

    def run(*arguments: str) -> tuple[int, str]:
        seen = io.StringIO()
        monkeypatch.setattr(console, "file", seen)
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, seen.getvalue() + done.stderr

    return run


def test_cancel_kills_all_runs_of_the_kubeflow_run_and_a_resumed_one_runs_again(started: Started, baton: Any) -> None:
    run_id = started.submit()
    first, second = started.train(run_id, "mine-one"), started.train(run_id, "mine-two")
    other = started.train("another", "other")
    started.ends(run_id, "RUNNING")
    code, said = baton("cancel", run_id)
    assert code == 0, said
    assert "MLflow: run mine-one is killed" in said
    assert [started.status(run) for run in (first, second, other)] == ["KILLED", "KILLED", "RUNNING"]

    started.train("submitted-again", "mine-one")
    started.ends(run_id, "FAILED", cancelled=True)
    code, said = baton("status", run_id)
    assert (code, "MLflow" in said) == (1, False)  # what another run has resumed is not this one's
    assert [started.status(run) for run in (first, second)] == ["RUNNING", "KILLED"]


@pytest.mark.parametrize(
    ("state", "cancelled", "ended"),
    [("FAILED", True, "KILLED"), ("FAILED", False, "FAILED"), ("RUNNING", False, "RUNNING")],
    ids=["terminated on the page", "pod lost", "still runs"],
)
@pytest.mark.parametrize("wait", [False, True], ids=["status", "status --wait"])
def test_status_ends_what_a_run_has_left_running(
    state: str, cancelled: bool, ended: str, wait: bool, started: Started, baton: Any
) -> None:
    run_id = started.submit()
    run = started.train(run_id, f"mine-{run_id}")
    started.api.stops_at = "train-chunk-2"
    started.ends(run_id, state, cancelled=cancelled)
    if wait and state == "RUNNING":
        started.ends(run_id, "SUCCEEDED")
    code, said = baton("status", run_id, *(["--wait"] if wait else []))
    assert code == (0 if ended == "RUNNING" else 1), said
    assert started.status(run) == ended
    assert (f"MLflow: run mine-{run_id} is {ended.lower()}" in said) == (ended != "RUNNING")


def test_people_reach_the_server_by_another_address(
    kfp_api: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baton: Any
) -> None:
    package = _compiled(tmp_path, "http://127.0.0.1:9", **{"tracking.mlflow_page": server})
    started = Started(kfp_api, package, server, tmp_path / "store", monkeypatch)
    run_id = started.submit()
    run = started.train(run_id, "by-its-page")
    started.ends(run_id, "FAILED", cancelled=True)
    assert baton("status", run_id)[0] == 1
    assert started.status(run) == "KILLED"


def test_a_server_that_is_away_is_said(
    kfp_api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baton: Any
) -> None:
    package = _compiled(tmp_path, "http://127.0.0.1:9")
    run_id = submit(str(package), kfp_api.url, experiment="e", run_name="mine", arguments={}).run_id
    code, said = baton("cancel", run_id)
    assert code == 0
    assert "MLflow at http://127.0.0.1:9 cannot be reached from here: the run's entry there stays open" in said


def test_an_untracked_run_asks_no_server(kfp_api: Any, tmp_path: Path, baton: Any) -> None:
    package = _compiled(tmp_path, "null")
    run_id = submit(str(package), kfp_api.url, experiment="e", run_name="mine", arguments={}).run_id
    code, said = baton("cancel", run_id)
    assert (code, "MLflow" in said) == (0, False)
