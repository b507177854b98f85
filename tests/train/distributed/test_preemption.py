"""Notices of preemption: from a real signal, a file, and services that speak as the clouds' documentation says."""

from __future__ import annotations

import json
import logging
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from baton.recipe.run import Preemption
from baton.train import preemption
from baton.train.preemption import PreemptionWatch

Answer = tuple[int, str]


class Service:
    """An HTTP server whose answers a test decides.

    Attributes:
        answer: Returns status and body for a method, a path and the headers.
        asked: Method and path of every request.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[str] = []
        self.answer: Callable[[str, str, Any], Answer] = lambda method, path, headers: (404, "")
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = service.answer(self.command, self.path, self.headers)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())
                service.asked.append(f"{self.command} {self.path}")

            do_PUT = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def is_asked(self, times: int) -> None:
        """Waits until that many further requests are answered."""
        count = len(self.asked) + times
        _wait(lambda: len(self.asked) >= count)

    def stop(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.stop()


def _wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "nothing has happened in two minutes"
        time.sleep(0.005)


def _watch(on_notice: Callable[[str], None] = lambda notice: None, **settings: Any) -> PreemptionWatch:
    return PreemptionWatch(Preemption(**settings), interval=0.02, on_notice=on_notice)


def _learns(watch: PreemptionWatch) -> str:
    _wait(lambda: watch.notice)
    assert watch.notice
    return watch.notice


SCRIPT = """
import os, signal, sys, time
from baton.train.preemption import PreemptionWatch
from baton.recipe.run import Preemption

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: two threads speak

with PreemptionWatch(Preemption(), interval=0.02, on_notice=lambda notice: say("called with", notice)) as watch:
    ready, alive = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(alive, b"1")
        time.sleep(10)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    say("child ended by", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "notice", watch.notice)
    while watch.notice is None:
        time.sleep(0.01)
    say(watch.notice)
    sys.stdin.readline()
say("left")
time.sleep(10)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that runs the script."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_sigterm_is_noticed_and_survived_until_the_watch_is_left(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() == "child ended by -15 notice None\n"
    process.send_signal(signal.SIGTERM)
    assert {process.stdout.readline(), process.stdout.readline()} == {"SIGTERM\n", "called with SIGTERM\n"}
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "left\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == -signal.SIGTERM


def test_a_file_appears(tmp_path: Path) -> None:
    calls: list[str] = []
    with _watch(calls.append, notice_file=str(tmp_path / "leave")) as watch:
        time.sleep(0.1)
        assert watch.notice is None
        (tmp_path / "leave").touch()
        assert _learns(watch) == f"file {tmp_path / 'leave'} appeared"
    assert calls == [watch.notice]


def test_the_first_notice_stays(tmp_path: Path, service: Service) -> None:
    with _watch(notice_file=str(tmp_path / "leave"), notice_url=f"{service.url}/leave") as watch:
        service.is_asked(1)
        (tmp_path / "leave").touch()
        first = _learns(watch)
        service.answer = lambda *_: (200, "")
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert watch.notice == first


def test_handlers_are_put_back_and_threads_end(tmp_path: Path, service: Service) -> None:
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with _watch(notice_file=str(tmp_path / "leave"), notice_url=service.url) as watch:
        assert signal.getsignal(signal.SIGTERM) == watch._on_sigterm
        service.is_asked(1)
    assert signal.getsignal(signal.SIGTERM) == before
    _wait(lambda: threading.active_count() == threads)
    (tmp_path / "leave").touch()
    time.sleep(0.05)
    assert watch.notice is None


def test_another_thread_watches_all_but_signals(tmp_path: Path) -> None:
    (tmp_path / "leave").touch()
    before, notices = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with _watch(notice_file=str(tmp_path / "leave")) as watch:
            assert signal.getsignal(signal.SIGTERM) == before
            notices.append(_learns(watch))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert notices == [f"file {tmp_path / 'leave'} appeared"]


def test_the_notice_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "leave").touch()
    with PreemptionWatch(Preemption(notice_file=str(tmp_path / "leave")), interval=0.02) as watch:
        _learns(watch)
    assert _warnings(caplog) == [f"this machine will be preempted: file {tmp_path / 'leave'} appeared"]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


ACTION = "/latest/meta-data/spot/instance-action"


def test_aws(service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    state: dict[str, Any] = {"token": "t1", "action": (404, "not found")}

    def answer(method: str, path: str, headers: Any) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, state["token"]) if headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600" else (400, "")
        if headers["X-aws-ec2-metadata-token"] != state["token"]:
            return 401, ""
        if path == "/latest/meta-data/events/recommendations/rebalance":
            return 200, '{"noticeTime": "2026-01-01T00:00:00Z"}'
        return state["action"] if path == ACTION else (404, "")

    service.answer = answer
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url + "/")
    with _watch(notice_url="aws") as watch:
        service.is_asked(4)
        assert watch.notice is None
        assert service.asked.count("PUT /latest/api/token") == 1
        state["token"] = "t2"
        service.is_asked(4)
        assert watch.notice is None
        assert service.asked.count("PUT /latest/api/token") == 2
        state["action"] = (200, '{"action": "terminate",\n "time": "2026-01-01T00:02:00Z"}')
        assert _learns(watch) == f'{service.url}{ACTION} says {{"action": "terminate", "time": "2026-01-01T00:02:00Z"}}'
    assert _warnings(caplog) == []


@pytest.mark.parametrize(
    ("key", "harmless", "leaving"),
    [
        ("preempted", "FALSE", "TRUE"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_gcp(service: Service, monkeypatch: pytest.MonkeyPatch, key: str, harmless: str, leaving: str) -> None:
    values = {"preempted": "FALSE", "maintenance-event": "NONE", key: harmless}

    def answer(method: str, path: str, headers: Any) -> Answer:
        if headers["Metadata-Flavor"] != "Google":
            return 403, ""
        return 200, values[path.removeprefix("/computeMetadata/v1/instance/")]

    service.answer = answer
    monkeypatch.setenv("GCE_METADATA_HOST", service.url.removeprefix("http://"))
    with _watch(notice_url="gcp") as watch:
        service.is_asked(4)
        assert watch.notice is None
        values[key] = leaving
        assert _learns(watch) == f"{service.url}/computeMetadata/v1/instance/{key} says {leaving}"


def _azure(events: list[dict[str, Any]], name: Answer) -> Callable[[str, str, Any], Answer]:
    def answer(method: str, path: str, headers: Any) -> Answer:
        if headers["Metadata"] != "true":
            return 400, ""
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})
        return name if path.startswith("/metadata/instance/compute/name?") else (404, "")

    return answer


def _event(kind: str, *machines: str) -> dict[str, Any]:
    return {"EventType": kind, "ResourceType": "VirtualMachine", "Resources": list(machines), "EventStatus": "Started"}


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ((200, "pool_1"), _event("Preempt", "pool_0", "POOL_1")),
        ((200, "pool_1"), _event("Terminate", "pool_1")),
        ((500, ""), _event("Preempt", "pool_0")),
    ],
    ids=["spot", "terminated", "without-a-name"],
)
def test_azure(service: Service, monkeypatch: pytest.MonkeyPatch, name: Answer, event: dict[str, Any]) -> None:
    service.answer = _azure([_event("Freeze", "pool_1"), _event("Reboot", "pool_1")], name)
    monkeypatch.setenv("AZURE_METADATA_ENDPOINT", service.url)
    with _watch(notice_url="azure") as watch:
        service.is_asked(2)
        assert watch.notice is None
        service.answer = _azure([_event("Freeze", "pool_1"), event], name)
        assert _learns(watch).endswith(f"/metadata/scheduledevents?api-version=2020-07-01 says {event['EventType']}")


def test_azure_tells_of_another_machine_of_the_scale_set(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.answer = _azure([_event("Preempt", "pool_0", "pool_10")], (200, "pool_1"))
    monkeypatch.setenv("AZURE_METADATA_ENDPOINT", service.url)
    with _watch(notice_url="azure") as watch:
        service.is_asked(4)
        assert watch.notice is None


@pytest.mark.parametrize("nothing", [404, 204])
def test_an_address(service: Service, monkeypatch: pytest.MonkeyPatch, nothing: int) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service.answer = lambda *_: (nothing, "")
    with _watch(notice_url=f"{service.url}/leave") as watch:
        service.is_asked(2)
        assert watch.notice is None
        service.answer = lambda *_: (200, "")
        assert _learns(watch) == f"{service.url}/leave answers 200"


def test_an_address_that_fails_is_one_warning_and_asked_on(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.answer = lambda *_: (500, "")
    with _watch(notice_url=f"{service.url}/leave") as watch:
        service.is_asked(4)
        assert watch.notice is None
        service.answer = lambda *_: (200, "")
        assert _learns(watch) == f"{service.url}/leave answers 200"
    (warning,) = _warnings(caplog)
    assert f"{service.url}/leave answers 500" in warning


def test_a_service_out_of_reach_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, but not listening: connections are refused
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/leave"
        with _watch(notice_url=url) as watch:
            time.sleep(0.4)
            assert watch.notice is None
    (warning,) = _warnings(caplog)
    assert url in warning
    assert "refused" in warning


def test_an_address_that_is_none_is_refused_by_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with (
        pytest.raises(ValidationError, match="expected aws, gcp, azure or an http address"),
        _watch(notice_url=f"file://{tmp_path}/x"),
    ):
        pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a pod finds it, `ca.crt` and `token`, with the API server's own `tls.pem`."""
    pytest.importorskip("cryptography")
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("serviceaccount")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "ca.crt").write_bytes(public)
    (folder / "tls.pem").write_bytes(public + private)
    (folder / "token").write_text("t1\n")
    return folder


@pytest.fixture
def api_server(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The API server of the pod that this process plays."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "tls.pem")
    service = Service(tls)
    (certificates / "token").write_text("t1\n")
    monkeypatch.setattr(preemption, "SERVICE_ACCOUNT", str(certificates))
    monkeypatch.setattr(preemption, "NODE_PAUSE", 1)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(service.port))
    monkeypatch.setenv("NODE_NAME", "n1")
    yield service
    service.stop()


KEY = "cloud.google.com/impending-node-termination"


def test_a_taint_of_the_node(api_server: Service, certificates: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec: dict[str, Any] = {"providerID": "x"}
    token = "t1"

    def answer(method: str, path: str, headers: Any) -> Answer:
        if headers["Authorization"] != f"Bearer {token}":
            return 401, ""
        return (200, json.dumps({"spec": spec})) if path == "/api/v1/nodes/n1" else (404, "")

    api_server.answer = answer
    with _watch(node_taints=["other", KEY]) as watch:
        api_server.is_asked(2)
        assert watch.notice is None
        spec["taints"] = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
        api_server.is_asked(2)
        assert watch.notice is None
        (certificates / "token").write_text("t2\n")
        token = "t2"
        spec["taints"].append({"key": KEY, "effect": "NoExecute"})
        assert _learns(watch) == f"node n1 has taint {KEY}"
    assert len(_warnings(caplog)) <= 1  # a request may be under way while the token changes


def test_a_node_that_may_not_be_read_is_one_warning(api_server: Service, caplog: pytest.LogCaptureFixture) -> None:
    api_server.answer = lambda *_: (403, "{}")
    with _watch(node_taints=[KEY]) as watch:
        _wait(lambda: caplog.records)
        time.sleep(0.1)
        assert watch.notice is None
    (warning,) = _warnings(caplog)
    assert "verb get on the resource nodes" in warning
    assert api_server.asked == ["GET /api/v1/nodes/n1"]


def test_an_api_server_with_another_certificate_is_not_trusted(
    api_server: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import certifi

    (tmp_path / "token").write_text("t1")
    (tmp_path / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    monkeypatch.setattr(preemption, "SERVICE_ACCOUNT", str(tmp_path))
    with _watch(node_taints=[KEY]) as watch:
        _wait(lambda: caplog.records)
        assert watch.notice is None
    (warning,) = _warnings(caplog)
    assert "CERTIFICATE_VERIFY_FAILED" in warning
    assert api_server.asked == []


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({}, "this is not a pod"), ({"KUBERNETES_SERVICE_HOST": "127.0.0.1"}, "NODE_NAME is not set")],
)
def test_taints_without_a_node_are_one_warning(
    environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with _watch(node_taints=[KEY]) as watch:
        _wait(lambda: caplog.records)
        time.sleep(0.1)
        assert watch.notice is None
    assert _warnings(caplog) == [f"the taints of the node are not watched: {reason}."]


def test_the_module_imports_no_client() -> None:
    clients = ("http.client", "kubernetes", "pydantic", "requests", "ssl", "urllib.request")
    module = "baton.train.preemption"
    code = f"import sys, {module}; print([name for name in {clients} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
