"""A run is submitted and watched: by the `kfp` command line, `submit` and `wait`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baton.errors import BatonError, UserError
from baton.kubeflow.submit import FINAL_STATES, MAX_TRANSIENT_FAILURES, wait


def run_kfp(api: Any, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the `kfp` command line in its own process, without the user's settings."""
    return subprocess.run(
        [Path(sys.executable).with_name("kfp"), "--endpoint", api.url, *arguments],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def states_of(api: Any, run_id: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """Wait for a run; return its final state and every state that was told on the way."""
    told: list[tuple[str, str]] = []
    final = wait(
        api.url,
        run_id,
        timeout_s=20,
        poll_s=0.01,
        on_state=lambda name, state: told.append((name, state)),
        **options,
    )
    return final, told


# The `kfp` command line


def test_the_kfp_command_submits_and_watches(kfp_api: Any, two_step_package: Path, tmp_path: Path):
    create = ["run", "create", "-e", "trials", "-r", "by-hand", "-f", str(two_step_package), "-w"]
    done = run_kfp(kfp_api, tmp_path, *create, "num_rows=3", 'label="0012"', "ratio=0.25", "is_final=false")

    assert done.returncode == 0, done.stderr
    assert "Run is finished with state SUCCEEDED." in done.stdout
    (run,) = kfp_api.runs.values()
    assert run["display_name"] == "by-hand"
    expected = {"num_rows": 3, "label": "0012", "ratio": 0.25, "is_final": False}
    assert run["runtime_config"]["parameters"] == expected
    assert run["experiment_id"] in kfp_api.experiments
    assert set(run["pipeline_spec"]) == {"pipeline_spec", "platform_spec"}


@pytest.mark.slow
def test_the_kfp_command_submits_under_its_old_name(kfp_api: Any, two_step_package: Path, tmp_path: Path):
    arguments = ["run", "submit", "-e", "trials", "-r", "old", "-f", str(two_step_package), "num_rows=3"]

    for _ in range(2):
        done = run_kfp(kfp_api, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr

    assert len(kfp_api.runs) == 2
    assert len(kfp_api.experiments) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["num_rows=3", "typo=1"], "unknown parameter typo"),
        pytest.param(["num_rows=3.5"], "num_rows is 3.5, expected NUMBER_INTEGER", marks=pytest.mark.slow),
        (["num_rows=3", "label=0012"], "label is 12, expected STRING"),
        pytest.param([], "num_rows is required", marks=pytest.mark.slow),
    ],
    ids=["unknown", "wrong type", "a string that kfp reads as a number", "missing"],
)
def test_the_api_refuses_wrong_parameters(
    arguments: list[str], complaint: str, kfp_api: Any, two_step_package: Path, tmp_path: Path
):
    create = ["run", "create", "-e", "trials", "-r", "wrong", "-f", str(two_step_package)]

    done = run_kfp(kfp_api, tmp_path, *create, *arguments)

    assert done.returncode == 1
    assert complaint in done.stderr
    assert kfp_api.runs == {}


@pytest.mark.slow
def test_the_kfp_command_uploads_and_lists(kfp_api: Any, two_step_package: Path, tmp_path: Path, submit_to: Any):
    uploaded = run_kfp(kfp_api, tmp_path, "pipeline", "create", "-p", "two steps", str(two_step_package))
    submitted = submit_to(kfp_api.url, two_step_package)
    runs = run_kfp(kfp_api, tmp_path, "--output", "json", "run", "list")

    assert uploaded.returncode == 0, uploaded.stderr
    assert [pipeline["display_name"] for pipeline in kfp_api.registry.pipelines.values()] == ["two steps", "two-steps"]
    assert [run["run_id"] for run in json.loads(runs.stdout)] == [submitted.run_id]


# submit()


def test_submit_creates_the_experiment_and_the_run(
    kfp_api: Any, two_step_package: Path, capsys: pytest.CaptureFixture[str], submit_to: Any
):
    submitted = submit_to(kfp_api.url, two_step_package, arguments={"num_rows": 3, "label": "0012"})

    (experiment,) = kfp_api.experiments.values()
    run = kfp_api.runs[submitted.run_id]
    assert experiment["display_name"] == "trials"
    assert run["experiment_id"] == experiment["experiment_id"]
    given = {"num_rows": 3, "label": "0012"}
    assert run["runtime_config"]["parameters"] == {**given, "ratio": 0.5, "is_final": True}
    assert submitted.run_name == "first"
    assert submitted.url == f"{kfp_api.url}/#/runs/details/{submitted.run_id}"
    assert capsys.readouterr() == ("", "")


def test_submit_uses_an_experiment_that_exists(kfp_api: Any, two_step_package: Path, submit_to: Any):
    known = kfp_api.add_experiment("trials")["experiment_id"]

    runs = [submit_to(kfp_api.url, two_step_package).run_id for _ in range(2)]

    assert [kfp_api.runs[run]["experiment_id"] for run in runs] == [known, known]


def test_submit_survives_losing_the_race_for_the_experiment(
    kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path, submit_to: Any
):
    def another_creates_it_first(method: str, path: str) -> None:
        if (method, path) == ("POST", "/apis/v2beta1/experiments"):
            kfp_api.add_experiment("trials")

    kfp_api.interfere = another_creates_it_first

    run = kfp_api.runs[submit_to(kfp_api.url, two_step_package).run_id]

    assert list(kfp_api.experiments) == [run["experiment_id"]]


def test_submit_sends_the_token(kfp_api: Any, two_step_package: Path, submit_to: Any, monkeypatch: pytest.MonkeyPatch):
    kfp_api.token = "letmein"
    monkeypatch.setenv("BATON_KFP_TOKEN", "letmein\n")

    submitted = submit_to(kfp_api.url, two_step_package)

    assert states_of(kfp_api, submitted.run_id)[0] == "SUCCEEDED"


# wait()


@pytest.mark.parametrize("final", sorted(FINAL_STATES))
def test_wait_tells_each_state_once_and_returns_the_last(
    final: str, kfp_api: Any, two_step_package: Path, submit_to: Any
):
    kfp_api.final_state = final
    submitted = submit_to(kfp_api.url, two_step_package)

    returned, told = states_of(kfp_api, submitted.run_id)

    assert returned == final
    assert told == [("first", "PENDING"), ("first", "RUNNING"), ("first", final)]


def fail_polls(api: Any, module: ModuleType, num_failures: int, status: int) -> None:
    """Let the first polls fail with a status."""
    left = num_failures

    def interfere(method: str, path: str) -> Any:
        nonlocal left
        if method == "GET" and "/runs/" in path and left > 0:
            left -= 1
            return module.RawAnswer(status, b"upstream connect error")
        return None

    api.interfere = interfere


@pytest.mark.parametrize("status", [429, 500, 503])
def test_wait_survives_a_few_failures(
    status: int, kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path, submit_to: Any
):
    submitted = submit_to(kfp_api.url, two_step_package)
    fail_polls(kfp_api, kfp_api_module, MAX_TRANSIENT_FAILURES, status)

    assert states_of(kfp_api, submitted.run_id)[0] == "SUCCEEDED"


def test_wait_gives_up_when_failures_go_on(
    kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path, submit_to: Any
):
    submitted = submit_to(kfp_api.url, two_step_package)
    fail_polls(kfp_api, kfp_api_module, 100, 503)

    with pytest.raises(BatonError, match=r"503: upstream connect error") as caught:
        states_of(kfp_api, submitted.run_id)

    assert caught.value.exit_code == 1
    assert kfp_api.requests.count(("GET", f"/apis/v2beta1/runs/{submitted.run_id}")) == 6


def test_wait_stops_after_its_time(kfp_api: Any, two_step_package: Path, submit_to: Any):
    submitted = submit_to(kfp_api.url, two_step_package)
    run = kfp_api.runs[submitted.run_id]
    run["_states"].clear()

    with pytest.raises(BatonError, match=rf"PENDING after 0\.2 s.*{submitted.run_id}"):
        wait(kfp_api.url, submitted.run_id, timeout_s=0.2, on_state=lambda name, state: None, poll_s=0.05)


def test_wait_for_a_run_that_does_not_exist(kfp_api: Any):
    with pytest.raises(UserError, match="Run nobody not found"):
        states_of(kfp_api, "nobody")
