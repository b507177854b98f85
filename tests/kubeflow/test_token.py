"""A token that ends before the run: it is read anew, or the run is said to go on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.errors import UserError
from baton.kubeflow import connection
from baton.kubeflow import submit as kubeflow

SUBMIT = ("submit", "quickstart", "--run", "mine", "--store", "s3://baton", "--wait", "--output", "json")
SOURCES = ("file", "kfp's file", "command", "itself")
REFUSALS: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "401": (401, b'{"message": "the token has expired"}', {}),
    "RBAC": (403, b'{"code": 7, "message": "RBAC: access denied"}', {}),
    "redirect": (302, b"", {"location": "https://dex.test/auth?state=s3cr3t"}),
    "login page": (200, b"<html><title>Log in to Dex</title></html>", {"content-type": "text/html"}),
}


@pytest.fixture
def place(kfp_api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the token; which setting leads there is up to the test."""
    monkeypatch.setattr(kubeflow, "POLL_S", 0.01)
    monkeypatch.setenv("BATON_KFP_ENDPOINT", kfp_api.url)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    for name in ("BATON_KFP_TOKEN", "KF_PIPELINES_TOKEN", connection.COMMAND, *connection.FILES):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text("first\n", encoding="utf-8")
    kfp_api.token = "first"
    return tmp_path / "token"


def use(source: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names where the token is from."""
    script = f"print(open({str(place)!r}).read())"
    settings = {
        "file": ("BATON_KFP_TOKEN_FILE", str(place)),
        "kfp's file": ("KF_PIPELINES_SA_TOKEN_PATH", str(place)),
        "command": ("BATON_KFP_TOKEN_COMMAND", shlex.join([sys.executable, "-c", script])),
        "itself": ("BATON_KFP_TOKEN", "first"),
    }
    monkeypatch.setenv(*settings[source])


def submitted(kfp_api: Any, *, token: str, place: Path, after: int, refusals: int, instead: Any = None) -> Any:
    """Submits and waits; the token changes at a look at the run, its file some refusals later."""
    looks = 0

    def interfere(method: str, path: str) -> Any:
        nonlocal looks
        if method == "GET" and "/v2beta1/runs/" in path:
            looks += 1
            if looks == after:
                kfp_api.token = token
            if looks == after + refusals:
                place.write_text(token, encoding="utf-8")
            if instead and looks >= after and place.read_text(encoding="utf-8").strip() != token:
                return instead
        return None

    kfp_api.interfere = interfere
    return CliRunner().invoke(app, SUBMIT)


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("late", [0, 3], ids=["in time", "late"])
@pytest.mark.parametrize("source", SOURCES[:-1])
def test_a_token_that_ends_is_read_anew(
    source: str, late: int, refusal: str, kfp_api: Any, kfp_api_module: Any, place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(source, place, monkeypatch)
    instead = kfp_api_module.RawAnswer(*REFUSALS[refusal])
    done = submitted(kfp_api, token="second", place=place, after=2, refusals=late, instead=instead)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["state"] == "succeeded"
    assert kfp_api.token == place.read_text(encoding="utf-8") == "second"


@pytest.mark.parametrize("source", ["itself", "file"])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_where_it_cannot_be_the_run_goes_on_and_is_not_called_failed(
    refusal: str, source: str, kfp_api: Any, kfp_api_module: Any, place: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(source, place, monkeypatch)
    instead = kfp_api_module.RawAnswer(*REFUSALS[refusal])
    done = submitted(kfp_api, token="second", place=place, after=2, refusals=10**6, instead=instead)
    assert done.exit_code == 4, done.output
    told = json.loads(done.stdout)
    (run_id,) = kfp_api.runs
    known = {"run": "mine", "run_id": run_id, "url": f"{kfp_api.url}/#/runs/details/{run_id}", "state": "unknown"}
    assert {key: told[key] for key in known} == known
    assert told["exit_code"] == 4
    assert kfp_api.url in told["error"]
    assert "s3cr3t" not in done.output
    assert "the run continues; `baton status mine --wait` follows it again" in done.stderr

    (tmp_path / "result.json").write_text(done.stdout, encoding="utf-8")
    outcome = CliRunner().invoke(
        app, ["ci-report", "quickstart", "--result", str(tmp_path / "result.json"), "--store", str(tmp_path / "store")]
    )
    assert outcome.exit_code == 4
    assert "failed" not in outcome.stdout.splitlines()[0]
    assert "not followed to its end" in outcome.stdout
    assert told["url"] in outcome.stdout


@pytest.mark.parametrize("end", ["timeout", "interrupt", "interrupt between", "away"])
def test_whatever_ends_the_watching_keeps_the_run(end: str, kfp_api: Any, kfp_api_module: Any, place: Path) -> None:
    kfp_api.token = None
    if end == "interrupt between":  # a loss and the next start
        kfp_api.final_state, kfp_api.stops_at = "FAILED", "train-chunk-2"
        kfp_api.messages = {"train-chunk-2": "main: Error (exit code 137)"}

    def interfere(method: str, path: str) -> Any:
        if path.endswith(":retry"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        if method == "GET" and "/v2beta1/runs/" in path and end != "interrupt between":
            if end == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            if end == "away":
                return kfp_api_module.RawAnswer(503, b"upstream connect error")
            kfp_api.runs[path.rpartition("/")[2]]["_states"].clear()
        return None

    kfp_api.interfere = interfere
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    patience = "1" if "interrupt" in end else "0.00003"
    done = CliRunner().invoke(app, [*SUBMIT, "--retries", "1", "--timeout", patience])
    told, (run_id,) = json.loads(done.stdout), kfp_api.runs
    assert (told["run_id"], told["state"]) == (run_id, "unknown")
    assert done.exit_code == told["exit_code"] == (130 if "interrupt" in end else 4)


@pytest.mark.parametrize("status", [401, 503], ids=["refused", "away"])
def test_a_run_of_which_nobody_knows_whether_it_was_started_again_is_not_submitted_twice(
    status: int, kfp_api: Any, kfp_api_module: Any, place: Path
) -> None:
    kfp_api.token, kfp_api.final_state, kfp_api.stops_at = None, "FAILED", "train-chunk-2"
    kfp_api.messages = {"train-chunk-2": "main: Error (exit code 137)"}
    answer = kfp_api_module.RawAnswer(status, b'{"message": "no"}')
    kfp_api.interfere = lambda method, path: answer if path.endswith(":retry") else None
    done = CliRunner().invoke(app, [*SUBMIT, "--retries", "2"])
    assert len(kfp_api.runs) == 1
    assert (done.exit_code, json.loads(done.stdout)["state"]) == (4, "unknown")


def test_a_run_that_failed_and_cannot_be_submitted_again_has_failed(
    kfp_api: Any, kfp_api_module: Any, place: Path
) -> None:
    kfp_api.token, kfp_api.final_state, kfp_api.stops_at = None, "FAILED", "train-chunk-2"
    kfp_api.messages, kfp_api.retry_fails = {"train-chunk-2": "main: Error (exit code 137)"}, True
    refused = kfp_api_module.RawAnswer(403, b'{"message": "RBAC: access denied"}')

    def interfere(method: str, path: str) -> Any:
        return refused if method == "POST" and path.endswith("/runs") and kfp_api.runs else None

    kfp_api.interfere = interfere
    done = CliRunner().invoke(app, [*SUBMIT, "--retries", "2"])
    told, (run_id,) = json.loads(done.stdout), kfp_api.runs
    assert (done.exit_code, told["state"], told["run_id"]) == (1, "failed", run_id)
    assert "RBAC: access denied" in told["error"]


def test_what_a_token_is_taken_from(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that renews it goes before one that does not; kfp's own file is the last."""
    assert connection.token() is None
    found = []
    for name in reversed(SOURCES):
        monkeypatch.setenv("BATON_KFP_TOKEN", "itself")
        use("kfp's file", place, monkeypatch)
        if name != "itself":
            use(name, place, monkeypatch)
        token = connection.token()
        found.append(token if isinstance(token, str) else type(token).__name__)
        for variable in ("BATON_KFP_TOKEN_FILE", connection.COMMAND):
            monkeypatch.delenv(variable, raising=False)
    assert found == ["itself", "Renewed", "itself", "Renewed"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BATON_KFP_TOKEN_FILE", "/nowhere/token", "BATON_KFP_TOKEN_FILE is '/nowhere/token', which cannot be read"),
        ("KF_PIPELINES_SA_TOKEN_PATH", "/nowhere/token", "KF_PIPELINES_SA_TOKEN_PATH is '/nowhere/token'"),
        ("BATON_KFP_TOKEN_COMMAND", "sh -c 'echo no session >&2; exit 3'", "which fails (no session)"),
        ("BATON_KFP_TOKEN_COMMAND", "nosuchprogram", "nosuchprogram"),
        ("BATON_KFP_TOKEN_COMMAND", "echo two words", "The token holds a space"),
        ("BATON_KFP_TOKEN_COMMAND", "echo 'unclosed", "which fails (No closing quotation)"),
    ],
)
def test_a_source_without_a_token_is_one_message(
    name: str, value: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        connection.token()
    assert said in caught.value.message
    assert caught.value.remedy
    done = CliRunner().invoke(app, ["status", "mine"])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("result", "heading", "code"),
    [
        ("", "not followed to its end", 4),
        ('{"state": "failed", "error": "recipe is not a file", "exit_code": 2}', "not started", 2),
        ('{"state": "failed", "run": "mine", "run_id": "1", "url": "http://x"}', "failed", 1),
        ('{"state": "unknown", "run": "mine", "run_id": "1", "error": "?", "exit_code": 130}', "not followed", 130),
        ('{"state": "succeeded", "run": "mine", "run_id": "1", "url": "http://x"}', "succeeded", 0),
    ],
    ids=["nothing", "no run", "failed", "interrupted", "succeeded"],
)
def test_that_a_run_failed_is_for_kubeflow_to_say(result: str, heading: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(result, encoding="utf-8")
    told = CliRunner().invoke(
        app, ["ci-report", "quickstart", "--result", str(tmp_path / "result.json"), "--store", str(tmp_path)]
    )
    assert told.exit_code == code, told.output
    assert told.stdout.startswith(f"### Training of quickstart: {heading}")
