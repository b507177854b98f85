"""Proxies of the environment: store, rows and Kubeflow's client pass the same one, and none for the same hosts."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from baton import doctor, machine
from baton.errors import BatonError, UnavailableError
from baton.kubeflow.connection import connect
from baton.store.sources import file_system
from baton.store.storage import Storage

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


class Server(ThreadingHTTPServer):
    """Answers everything, and notes what it was asked with which password.

    Attributes:
        seen: Requests with their password for a proxy.
        status: Of each answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str]] = []
        self.status = 200
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, self.headers.get("Proxy-Authorization", "")))
        self.send_response(self.server.status)
        for name, value in {
            "ETag": '"e"',
            "Last-Modified": "Wed, 25 Nov 2026 21:00:00 GMT",
            "Content-Length": "2",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"{}")

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, aws_env: Callable[..., None]) -> Iterator[tuple[Server, Server]]:
    """What is asked, and a proxy that the environment names for it."""
    direct, proxy = Server(), Server()
    for name in VARIABLES:
        for variable in (name, name.lower()):
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://user:very%20secret@127.0.0.1:{proxy.server_port}")
    aws_env(AWS_ENDPOINT_URL=direct.address, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
    yield direct, proxy
    for server in (direct, proxy):
        server.shutdown()
        server.server_close()


def store(address: str) -> None:
    Storage("s3://b/p", patience=0).write("k", b"")


def rows(address: str) -> None:
    file_system(Storage("s3://b/p", patience=0)).info("b/p/k")


def kubeflow(address: str) -> None:
    connect(address)


CLIENTS = {"store": store, "rows": rows, "kubeflow": kubeflow}
EXCLUDED = {
    "": False,
    "127.0.0.1": True,
    "127.0.0.1:{port}": True,
    "127.0.0.1:1": False,
    "*": True,
    "example.org": False,
    " example.org , 127.0.0.1 ": True,
    "127.0.0.0/8": True,
    "10.0.0.0/8": False,
}


@pytest.mark.parametrize("ask", CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize(("excluded", "is_straight"), EXCLUDED.items(), ids=[name or "none" for name in EXCLUDED])
def test_all_clients_pass_the_same_proxy(
    excluded: str,
    is_straight: bool,
    ask: Callable[[str], None],
    servers: tuple[Server, Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct, proxy = servers
    if excluded:
        monkeypatch.setenv("NO_PROXY", excluded.format(port=direct.server_port))
    ask(direct.address)

    assert bool(direct.seen) == is_straight
    assert bool(proxy.seen) != is_straight
    for _, password in proxy.seen:
        assert base64.b64decode(password.removeprefix("Basic ")) == b"user:very secret"


@pytest.mark.parametrize("value", ["127.0.0.1:{port}", "http://127.0.0.1:{port}"], ids=["no scheme", "a scheme"])
@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
def test_each_variable_is_read(
    variable: str, value: str, servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, proxy = servers
    monkeypatch.delenv("HTTP_PROXY")
    monkeypatch.setenv(variable, value.format(port=proxy.server_port))
    for ask in CLIENTS.values():
        proxy.seen.clear()
        ask(direct.address)
        assert proxy.seen
    assert direct.seen == []
    assert str(machine.proxy_for(direct.address)) == f"http://127.0.0.1:{proxy.server_port} ({variable})"


STANDARD = {
    "https://s3.eu-west-1.amazonaws.com": ("amazonaws.com", ".amazonaws.com", "s3.eu-west-1.amazonaws.com:443"),
    "http://minio:9000/x": ("minio", "minio:9000", "*"),
}


@pytest.mark.parametrize(("url", "excluded"), [(url, each) for url, all_ in STANDARD.items() for each in all_])
def test_hosts_by_name(url: str, excluded: str, servers: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert machine.proxy_for(url)
    monkeypatch.setenv("NO_PROXY", f"other, {excluded}" if excluded != "*" else excluded)
    assert machine.proxy_for(url) is None
    monkeypatch.setenv("NO_PROXY", "s3.eu-west-1.amazonaws.com:9000,minio:9001,azonaws.com.org")
    assert machine.proxy_for(url)


def said(use: Callable[[], Any]) -> BatonError:
    with pytest.raises(BatonError) as caught:
        use()
    assert "secret" not in str(caught.value)
    return caught.value


def test_a_message_names_the_proxy(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    direct, proxy = servers
    named = f"http://127.0.0.1:{proxy.server_port} (HTTP_PROXY)"
    uses = (lambda: Storage("s3://b/p", patience=0).write("k", b""), lambda: kubeflow(direct.address))
    for status in (403, 407, 503):
        proxy.status = status
        for use in uses:
            monkeypatch.setattr("baton.store.clouds.RETRIES", {"max_retries": 0})
            assert "proxy" in str(said(use))
    proxy.shutdown()
    proxy.server_close()
    refused = said(uses[0])
    assert isinstance(refused, UnavailableError)
    assert f"the proxy {named}" in refused.message
    assert "NO_PROXY" in str(refused.remedy)
    assert f"The proxy was {named}" in str(said(uses[1]))


def test_a_proxy_of_another_kind_is_refused(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "socks5://user:secret@127.0.0.1:1")
    error = said(lambda: kubeflow(servers[0].address))
    assert "socks5://127.0.0.1:1 (HTTP_PROXY); expected one that speaks HTTP" in error.message


def test_the_doctor_says_which_applies(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    direct, proxy = servers

    def found() -> list[str]:
        checks = [*doctor.examine_store("s3://b/p"), *doctor.examine_kubeflow(direct.address, None)]
        return [check.found for check in checks if check.name in ("store: proxy", "kubeflow: proxy")]

    assert found() == [f"{direct.address} is asked through http://127.0.0.1:{proxy.server_port} (HTTP_PROXY)"] * 2
    monkeypatch.setenv("NO_PROXY", "*")
    assert found() == [f"{direct.address} is asked straight, by NO_PROXY"] * 2
    monkeypatch.delenv("HTTP_PROXY")
    assert found() == []
    assert "HTTPS_PROXY" not in os.environ
