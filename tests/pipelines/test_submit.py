import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from components.shared.errors import BatonError, UserError
from pipelines.submit import FINAL_STATES, MAX_TRANSIENT_FAILURES, Submission, submit, wait

LOGIN_PAGE = b"<!doctype html><html><head><title>Log in\n to Dex</title></head><body>experiments</body></html>"
HTML = {"content-type": "text/html"}


def run_kfp(api: Any, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the `kfp` command line in a process of its own, without the user's settings."""
    return subprocess.run(
        [Path(sys.executable).with_name("kfp"), "--endpoint", api.url, *arguments],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def submit_to(endpoint: str, package: Path, **options: Any) -> Submission:
    options = {"experiment": "trials", "run_name": "first", "arguments": {"num_rows": 3}, **options}
    return submit(str(package), endpoint, **options)


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
        (["num_rows=3.5"], "num_rows is 3.5, expected NUMBER_INTEGER"),
        (["num_rows=3", "label=0012"], "label is 12, expected STRING"),
        ([], "num_rows is required"),
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


def test_the_kfp_command_uploads_and_lists(kfp_api: Any, two_step_package: Path, tmp_path: Path):
    uploaded = run_kfp(kfp_api, tmp_path, "pipeline", "create", "-p", "two steps", str(two_step_package))
    submitted = submit_to(kfp_api.url, two_step_package)
    runs = run_kfp(kfp_api, tmp_path, "--output", "json", "run", "list")

    assert uploaded.returncode == 0, uploaded.stderr
    assert [pipeline["display_name"] for pipeline in kfp_api.pipelines.values()] == ["two steps"]
    assert [run["run_id"] for run in json.loads(runs.stdout)] == [submitted.run_id]


# submit()


def test_submit_creates_the_experiment_and_the_run(
    kfp_api: Any, two_step_package: Path, capsys: pytest.CaptureFixture[str]
):
    submitted = submit_to(kfp_api.url, two_step_package, arguments={"num_rows": 3, "label": "0012"})

    (experiment,) = kfp_api.experiments.values()
    run = kfp_api.runs[submitted.run_id]
    assert experiment["display_name"] == "trials"
    assert run["experiment_id"] == experiment["experiment_id"]
    assert run["runtime_config"]["parameters"] == {"num_rows": 3, "label": "0012"}
    assert submitted.run_name == "first"
    assert submitted.url == f"{kfp_api.url}/#/runs/details/{submitted.run_id}"
    assert capsys.readouterr() == ("", "")


def test_submit_uses_an_experiment_that_exists(kfp_api: Any, two_step_package: Path):
    known = kfp_api.add_experiment("trials")["experiment_id"]

    runs = [submit_to(kfp_api.url, two_step_package).run_id for _ in range(2)]

    assert [kfp_api.runs[run]["experiment_id"] for run in runs] == [known, known]


def test_submit_survives_losing_the_race_for_the_experiment(
    kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path
):
    def another_creates_it_first(method: str, path: str) -> None:
        if (method, path) == ("POST", "/apis/v2beta1/experiments"):
            kfp_api.add_experiment("trials")

    kfp_api.interfere = another_creates_it_first

    run = kfp_api.runs[submit_to(kfp_api.url, two_step_package).run_id]

    assert list(kfp_api.experiments) == [run["experiment_id"]]


def test_submit_sends_the_token(kfp_api: Any, two_step_package: Path):
    kfp_api.token = "letmein"

    submitted = submit_to(kfp_api.url, two_step_package, token="letmein\n")

    assert states_of(kfp_api, submitted.run_id, token="letmein")[0] == "SUCCEEDED"


# wait()


@pytest.mark.parametrize("final", sorted(FINAL_STATES))
def test_wait_tells_each_state_once_and_returns_the_last(final: str, kfp_api: Any, two_step_package: Path):
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
def test_wait_survives_a_few_failures(status: int, kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path):
    submitted = submit_to(kfp_api.url, two_step_package)
    fail_polls(kfp_api, kfp_api_module, MAX_TRANSIENT_FAILURES, status)

    assert states_of(kfp_api, submitted.run_id)[0] == "SUCCEEDED"


def test_wait_gives_up_when_failures_go_on(kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path):
    submitted = submit_to(kfp_api.url, two_step_package)
    fail_polls(kfp_api, kfp_api_module, 100, 503)

    with pytest.raises(BatonError, match=r"503: upstream connect error") as caught:
        states_of(kfp_api, submitted.run_id)

    assert caught.value.exit_code == 1
    assert kfp_api.requests.count(("GET", f"/apis/v2beta1/runs/{submitted.run_id}")) == 6


def test_wait_stops_after_its_time(kfp_api: Any, two_step_package: Path):
    submitted = submit_to(kfp_api.url, two_step_package)
    run = kfp_api.runs[submitted.run_id]
    run["_states"].clear()

    with pytest.raises(BatonError, match=rf"PENDING after 0\.2 s.*{submitted.run_id}"):
        wait(kfp_api.url, submitted.run_id, timeout_s=0.2, on_state=lambda name, state: None, poll_s=0.05)


def test_wait_for_a_run_that_does_not_exist(kfp_api: Any):
    with pytest.raises(UserError, match="Run nobody not found"):
        states_of(kfp_api, "nobody")


# Everything an endpoint can do wrong


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_url() -> Iterator[str]:
    """A port that accepts a connection and hangs up without a word of HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.recv(1)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def refused(endpoint: str, package: Path, **options: Any) -> BatonError:
    """Submit where it must fail, within seconds and with one line to read."""
    started = time.monotonic()
    with pytest.raises(BatonError) as caught:
        submit_to(endpoint, package, **options)
    assert time.monotonic() - started < 10
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_unreachable(closed_port: int, two_step_package: Path):
    error = refused(f"http://127.0.0.1:{closed_port}", two_step_package)

    assert f"'http://127.0.0.1:{closed_port}' takes no connection" in str(error)
    assert "port-forward" in str(error.remedy)
    assert error.exit_code == 1


def test_a_host_that_does_not_resolve(two_step_package: Path):
    assert "does not resolve" in str(refused("http://kubeflow.invalid", two_step_package))


def test_a_port_that_does_not_speak_http(silent_url: str, two_step_package: Path):
    error = refused(silent_url, two_step_package)

    assert "does not answer in HTTP" in str(error)
    assert "https://" in str(error.remedy)


def test_a_port_that_never_answers(two_step_package: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.submit._HEALTHZ_TIMEOUTS_S", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = refused(f"http://127.0.0.1:{server.getsockname()[1]}", two_step_package)

    assert "does not answer in time" in str(error)


def test_https_to_a_port_that_speaks_http(kfp_api: Any, two_step_package: Path):
    error = refused(kfp_api.url.replace("http:", "https:"), two_step_package)

    assert "TLS" in str(error)
    assert "write http://" in str(error.remedy)


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, "asks for a token and got none"), ("s3cr3t", "refuses the token")],
    ids=["no token", "wrong token"],
)
def test_401(given: str | None, found: str, kfp_api: Any, two_step_package: Path):
    kfp_api.token = "letmein"

    error = refused(kfp_api.url, two_step_package, token=given)

    assert found in str(error)
    assert "BATON_KFP_TOKEN" in str(error.remedy)
    assert "s3cr3t" not in str(error)
    assert error.exit_code == 2
    assert len(kfp_api.requests) == 1


@pytest.mark.parametrize(
    ("status", "body", "headers", "found"),
    [
        (200, LOGIN_PAGE, HTML, "an HTML page titled 'Log in to Dex'"),
        (200, b"ok", {}, "answered with ok"),
        (
            302,
            b"",
            {"location": "https://dex.test/auth?state=s3cr3t"},
            "redirects to 'https://dex.test/auth'",
        ),
        (403, b'{"code": 7, "message": "RBAC: access denied"}', {}, "403: RBAC: access denied"),
        (404, b"404 page not found", {}, "has no Kubeflow Pipelines API (404: 404 page not found)"),
        (404, LOGIN_PAGE, HTML, "has no Kubeflow Pipelines API (404: an HTML page"),
        (500, b'{"code": 13, "message": "database is down"}', {}, "500: database is down"),
        (503, b"", {}, "503: an empty answer"),
    ],
    ids=["HTML page", "text", "redirect", "403", "404", "404 page", "500", "503"],
)
def test_an_answer_that_is_not_the_apis(
    status: int,
    body: bytes,
    headers: dict[str, str],
    found: str,
    kfp_api: Any,
    kfp_api_module: ModuleType,
    two_step_package: Path,
):
    kfp_api.interfere = lambda method, path: kfp_api_module.RawAnswer(status, body, headers)

    error = refused(kfp_api.url, two_step_package)

    assert found in str(error)
    assert f"'{kfp_api.url}'" in str(error)
    assert error.remedy
    assert "s3cr3t" not in str(error)


def test_a_page_after_a_good_health_check(kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path):
    page = kfp_api_module.RawAnswer(200, LOGIN_PAGE, HTML)
    kfp_api.interfere = lambda method, path: None if path.endswith("healthz") else page

    assert "Log in to Dex" in str(refused(kfp_api.url, two_step_package))


def test_a_wrong_path(kfp_api: Any, two_step_package: Path):
    error = refused(f"{kfp_api.url}/kubeflow", two_step_package)

    assert f"'{kfp_api.url}/kubeflow' has no Kubeflow Pipelines API" in str(error)
    assert "/pipeline" in str(error.remedy)


def test_a_backend_of_the_first_generation(kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path):
    def version_1(method: str, path: str) -> Any:
        if path == "/apis/v1beta1/healthz":
            return kfp_api_module.RawAnswer(200, b'{"multi_user": false}')
        return kfp_api_module.RawAnswer(404, b"404 page not found")

    kfp_api.interfere = version_1

    assert "speaks v1beta1" in str(refused(kfp_api.url, two_step_package))


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "localhost:8888",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host/#/experiments",
        "http://host/?token=s3cr3t",
        "http://two words",
        "http://me:s3cr3t@host",
        "http://[::1",
    ],
)
def test_a_malformed_address(endpoint: str, two_step_package: Path):
    error = refused(endpoint, two_step_package)

    assert "http(s)://HOST" in str(error)
    assert "me:s3cr3t" not in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize("name", ["trials", "first"], ids=["experiment", "run"])
def test_a_name_that_is_taken(name: str, kfp_api: Any, two_step_package: Path):
    kfp_api.taken_names = {name}

    error = refused(kfp_api.url, two_step_package)

    assert f"{name} already exists" in str(error)
    assert error.exit_code == 2


def test_two_experiments_of_one_name(kfp_api: Any, two_step_package: Path):
    kfp_api.add_experiment("trials")
    kfp_api.add_experiment("trials")

    assert "'trials' exists more than once" in str(refused(kfp_api.url, two_step_package))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"num_rows": 3, "typo": 1}, "unknown parameter typo"),
        ({"num_rows": "3"}, "num_rows is '3', expected NUMBER_INTEGER"),
        ({"num_rows": Path("rows")}, "'num_rows' is PosixPath"),
        ({"num_rows": float("nan")}, "'num_rows' is nan"),
    ],
    ids=["unknown", "wrong type", "not JSON", "not a number"],
)
def test_wrong_arguments(arguments: dict[str, object], found: str, kfp_api: Any, two_step_package: Path):
    error = refused(kfp_api.url, two_step_package, arguments=arguments)

    assert found in str(error)
    assert error.exit_code == 2
    assert kfp_api.runs == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.yaml", None),
        ("p.json", "{}"),
        ("broken.yaml", "a: ["),
        ("list.yaml", "- a"),
        ("odd.yaml", "a: 1"),
    ],
)
def test_a_package_that_is_no_pipeline(name: str, content: str | None, kfp_api: Any, tmp_path: Path):
    package = tmp_path / name
    if content is not None:
        package.write_text(content)

    error = refused(kfp_api.url, package)

    assert str(package) in str(error)
    assert error.exit_code == 2


def test_a_pipeline_the_backend_refuses(kfp_api: Any, two_step_package: Path, tmp_path: Path):
    documents = list(yaml.safe_load_all(two_step_package.read_text()))
    documents[0]["components"].pop("comp-report")
    package = tmp_path / "damaged.yaml"
    package.write_text(yaml.safe_dump_all(documents))

    assert "'comp-report' does not exist" in str(refused(kfp_api.url, package))


def test_a_token_that_no_header_can_carry_is_not_repeated(kfp_api: Any, two_step_package: Path):
    error = refused(kfp_api.url, two_step_package, token="s3cr3t token")

    assert "s3cr3t" not in str(error)
    assert kfp_api.requests == []
