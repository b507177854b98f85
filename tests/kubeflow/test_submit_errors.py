"""Everything an endpoint can do wrong, and everything that `submit` refuses."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from baton.errors import BatonError

LOGIN_PAGE = b"<!doctype html><html><head><title>Log in\n to Dex</title></head><body>experiments</body></html>"
HTML = {"content-type": "text/html"}


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


@pytest.fixture
def refused(submit_to: Any) -> Callable[..., BatonError]:
    """Submit where it must fail, within seconds and with one line to read."""

    def submit_in_vain(endpoint: str, package: Path, **options: Any) -> BatonError:
        started = time.monotonic()
        with pytest.raises(BatonError) as caught:
            submit_to(endpoint, package, **options)
        assert time.monotonic() - started < 10
        assert "expected" in str(caught.value)
        assert "\n" not in str(caught.value)
        return caught.value

    return submit_in_vain


def test_unreachable(closed_port: int, two_step_package: Path, refused: Any):
    error = refused(f"http://127.0.0.1:{closed_port}", two_step_package)

    assert f"'http://127.0.0.1:{closed_port}' takes no connection" in str(error)
    assert "port-forward" in str(error.remedy)
    assert error.exit_code == 1


def test_a_host_that_does_not_resolve(two_step_package: Path, refused: Any):
    assert "does not resolve" in str(refused("http://kubeflow.invalid", two_step_package))


def test_a_port_that_does_not_speak_http(silent_url: str, two_step_package: Path, refused: Any):
    error = refused(silent_url, two_step_package)

    assert "does not answer in HTTP" in str(error)
    assert "https://" in str(error.remedy)


def test_a_port_that_never_answers(two_step_package: Path, monkeypatch: pytest.MonkeyPatch, refused: Any):
    monkeypatch.setattr("baton.kubeflow.connection._HEALTHZ_TIMEOUTS_S", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = refused(f"http://127.0.0.1:{server.getsockname()[1]}", two_step_package)

    assert "does not answer in time" in str(error)


def test_https_to_a_port_that_speaks_http(kfp_api: Any, two_step_package: Path, refused: Any):
    error = refused(kfp_api.url.replace("http:", "https:"), two_step_package)

    assert "TLS" in str(error)
    assert "write http://" in str(error.remedy)


@pytest.mark.parametrize(
    ("given", "found"),
    [("", "asks for a token and got none"), ("s3cr3t", "refuses the token")],
    ids=["no token", "wrong token"],
)
def test_401(
    given: str, found: str, kfp_api: Any, two_step_package: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
):
    kfp_api.token = "letmein"
    monkeypatch.setenv("BATON_KFP_TOKEN", given)

    error = refused(kfp_api.url, two_step_package)

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
    refused: Any,
):
    kfp_api.interfere = lambda method, path: kfp_api_module.RawAnswer(status, body, headers)

    error = refused(kfp_api.url, two_step_package)

    assert found in str(error)
    assert f"'{kfp_api.url}'" in str(error)
    assert error.remedy
    assert "s3cr3t" not in str(error)


def test_a_page_after_a_good_health_check(
    kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path, refused: Any
):
    page = kfp_api_module.RawAnswer(200, LOGIN_PAGE, HTML)
    kfp_api.interfere = lambda method, path: None if path.endswith("healthz") else page

    assert "Log in to Dex" in str(refused(kfp_api.url, two_step_package))


def test_a_wrong_path(kfp_api: Any, two_step_package: Path, refused: Any):
    error = refused(f"{kfp_api.url}/kubeflow", two_step_package)

    assert f"'{kfp_api.url}/kubeflow' has no Kubeflow Pipelines API" in str(error)
    assert "/pipeline" in str(error.remedy)


def test_a_backend_of_the_first_generation(
    kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path, refused: Any
):
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
def test_a_malformed_address(endpoint: str, two_step_package: Path, refused: Any):
    error = refused(endpoint, two_step_package)

    assert "http(s)://HOST" in str(error)
    assert "me:s3cr3t" not in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize("name", ["trials", "first"], ids=["experiment", "run"])
def test_a_name_that_is_taken(name: str, kfp_api: Any, two_step_package: Path, refused: Any):
    kfp_api.taken_names = {name}

    error = refused(kfp_api.url, two_step_package)

    assert f"{name} already exists" in str(error)
    assert error.exit_code == 2


def test_two_experiments_of_one_name(kfp_api: Any, two_step_package: Path, refused: Any):
    kfp_api.add_experiment("trials")
    kfp_api.add_experiment("trials")

    assert "'trials' exists more than once" in str(refused(kfp_api.url, two_step_package))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"num_rows": 3, "typo": 1}, "unknown parameter typo"),
        ({"num_rows": "3"}, "num_rows is '3', expected NUMBER_INTEGER"),
    ],
    ids=["unknown", "wrong type"],
)
def test_wrong_arguments(arguments: dict[str, object], found: str, kfp_api: Any, two_step_package: Path, refused: Any):
    error = refused(kfp_api.url, two_step_package, arguments=arguments)

    assert found in str(error)
    assert error.exit_code == 2
    assert kfp_api.runs == {}


def test_a_pipeline_the_backend_refuses(kfp_api: Any, two_step_package: Path, tmp_path: Path, refused: Any):
    documents = list(yaml.safe_load_all(two_step_package.read_text()))
    documents[0]["components"].pop("comp-report")
    package = tmp_path / "damaged.yaml"
    package.write_text(yaml.safe_dump_all(documents))

    assert "'comp-report' does not exist" in str(refused(kfp_api.url, package))


def test_a_token_that_no_header_can_carry_is_not_repeated(
    kfp_api: Any, two_step_package: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BATON_KFP_TOKEN", "s3cr3t token")
    error = refused(kfp_api.url, two_step_package)

    assert "s3cr3t" not in str(error)
    assert kfp_api.requests == []
