"""The faulty proxy as HTTP: connections, how bodies are framed, and which requests a rule is for."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKS = b"5;note=1\r\nhello\r\n1\r\n!\r\n0\r\nx-amz-checksum: abc\r\nx-more: d\r\n\r\n"


@dataclass
class Heard:
    """A request as upstream got it."""

    peer: int
    head: bytes
    body: bytes


class Upstream(ThreadingTCPServer):
    """A server that answers every request in the same bytes.

    Attributes:
        answer: What it says once it has the request.
        early: What it says before the body.
        reads_body: Whether it does; if not, it closes after `early`.
        heard: The requests it got in full.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.answer = OK
        self.early = b""
        self.reads_body = True
        self.heard: list[Heard] = []


class Answering(StreamRequestHandler):
    server: Upstream

    def handle(self) -> None:
        while head := self._until(b"\r\n\r\n"):
            self.wfile.write(self.server.early)
            if not self.server.reads_body:
                return
            lower = head.lower()
            if b"chunked" in lower:
                body = self._until(b"\r\n\r\n")
            else:
                length = int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                if len(body := self.rfile.read(length)) < length:
                    return
            self.server.heard.append(Heard(self.client_address[1], head, body))
            self.wfile.write(self.server.answer)
            if b"Connection: close" in self.server.answer:
                return

    def _until(self, mark: bytes) -> bytes:
        data = b""
        while not data.endswith(mark) and (line := self.rfile.readline()):
            data += line
        return data


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(faulty_proxy: Callable[[str], Any], upstream: Upstream) -> Any:
    return faulty_proxy(upstream.endpoint)


@pytest.fixture
def client(proxy: Any) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=10)
    yield connection
    connection.close()


@pytest.fixture
def raw(proxy: Any) -> Iterator[socket.socket]:
    """A connection that says what it is told to."""
    host, port = proxy.endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        yield sock


def ask(client: http.client.HTTPConnection, method: str = "GET", path: str = "/", **options: Any) -> int:
    """Returns the status of the answer, once it is read."""
    client.request(method, path, **options)
    answer = client.getresponse()
    answer.read()
    return answer.status


def read(sock: socket.socket, end: bytes = b"") -> bytes:
    """Returns what comes up to some bytes, or to the connection's end."""
    data = b""
    while (not end or not data.endswith(end)) and (more := sock.recv(65536)):
        data += more
    return data


def test_connections_are_kept_on_both_sides(client: http.client.HTTPConnection, upstream: Upstream):
    ask(client)
    sock = client.sock
    ask(client, "PUT", body=b"x" * 100_000)
    ask(client, "PUT", body=iter([b"a", b"b"]))

    assert client.sock is sock
    assert len({heard.peer for heard in upstream.heard}) == 1
    assert [len(heard.body) for heard in upstream.heard] == [0, 100_000, len(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")]


def test_the_client_keeps_its_connection_when_upstream_closes(client: http.client.HTTPConnection, upstream: Upstream):
    upstream.answer = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    ask(client)
    sock = client.sock
    ask(client)

    assert client.sock is sock
    assert len({heard.peer for heard in upstream.heard}) == 2


def test_an_answer_that_ends_with_the_connection(raw: socket.socket, upstream: Upstream):
    upstream.answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end"
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert read(raw) == upstream.answer


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_a_status_without_body(raw: socket.socket, upstream: Upstream, status: bytes):
    upstream.answer = b"HTTP/1.1 %s\r\nETag: x\r\n\r\n" % status
    for _ in range(2):
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read(raw, b"\r\n\r\n") == upstream.answer


def test_chunks_and_trailers_pass_as_they_are(raw: socket.socket, upstream: Upstream):
    upstream.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS
    for _ in range(2):
        raw.sendall(b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS)
        assert read(raw, b"x-more: d\r\n\r\n") == upstream.answer

    assert [heard.body for heard in upstream.heard] == [CHUNKS, CHUNKS]


def test_a_body_is_sent_after_continue(raw: socket.socket, upstream: Upstream):
    upstream.early = CONTINUE
    for _ in range(2):
        raw.sendall(b"PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert read(raw, CONTINUE) == CONTINUE
        raw.sendall(b"abc")
        assert read(raw, b"ok") == OK

    assert [heard.body for heard in upstream.heard] == [b"abc", b"abc"]


def test_an_answer_instead_of_continue(raw: socket.socket, proxy: Any, upstream: Upstream):
    upstream.early, upstream.reads_body = OK, False
    raw.sendall(b"PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")

    assert read(raw) == OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def test_an_early_answer_gets_through(client: http.client.HTTPConnection, upstream: Upstream):
    upstream.early, upstream.reads_body = OK, False

    assert ask(client, "PUT", body=bytes(20_000_000)) == 200


def test_no_upstream(faulty_proxy: Callable[[str], Any]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = http.client.HTTPConnection(faulty_proxy(f"http://127.0.0.1:{port}").endpoint.removeprefix("http://"))

    with pytest.raises(ConnectionResetError):
        ask(client)


@pytest.mark.parametrize(("after", "seen"), [(3, b"5;note=1\r\nhel"), (1000, CHUNKS.partition(b"0\r\n")[0])])
def test_short_in_chunks(raw: socket.socket, proxy: Any, upstream: Upstream, after: int, seen: bytes):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream.answer = head + CHUNKS
    proxy.short(after=after)
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert read(raw) == head + seen


def test_a_fault_in_an_empty_body_shows(client: http.client.HTTPConnection, proxy: Any):
    rule = proxy.reset(after=5, methods="HEAD")

    with pytest.raises(ConnectionResetError):
        ask(client, "HEAD")
    assert rule.hits == 1


def test_corrupt_requests(client: http.client.HTTPConnection, proxy: Any, upstream: Upstream):
    proxy.corrupt(at=1, of="request")
    proxy.corrupt(at=100, of="request")
    ask(client, "PUT", body=b"000")

    assert upstream.heard[0].body == b"011"


def test_a_stall_that_ends(raw: socket.socket, proxy: Any):
    proxy.stall(0.2, after=1)
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert read(raw, b"o") == OK[:-1]
    started = time.monotonic()

    assert (read(raw, b"k"), time.monotonic() - started > 0.15) == (b"k", True)


def test_latency_and_rate(client: http.client.HTTPConnection, proxy: Any):
    proxy.latency(0.1)
    proxy.rate(100_000, methods="PUT")
    for method, body, seconds in (("PUT", bytes(20_000), 0.3), ("GET", b"", 0.1)):
        started = time.monotonic()
        ask(client, method, body=body)
        assert time.monotonic() - started >= seconds


def test_a_late_request_lands_though_its_client_is_gone(raw: socket.socket, proxy: Any, upstream: Upstream):
    rule = proxy.pause_at(methods="PUT")
    raw.sendall(b"PUT / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
    rule.wait_held()
    raw.close()
    rule.release()

    deadline = time.monotonic() + 10
    while not upstream.heard and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [heard.body for heard in upstream.heard] == [b"abc"]


def test_matches(client: http.client.HTTPConnection, proxy: Any):
    by_path = proxy.watch(path="/b/k=1", methods="GET", skip=1)
    by_pattern = proxy.watch(pattern=r"/k=\d$")
    by_header = proxy.watch(header="range", times=1)
    for headers in ({}, {"Range": "bytes=0-9"}, {"Range": "bytes=0-9"}):
        ask(client, path="/b/k%3D1", headers=headers)
    ask(client, "DELETE", "/b/k=1")
    ask(client, path="/b?prefix=k%3D1")

    counts = [(rule.seen, rule.hits) for rule in (by_path, by_pattern, by_header)]
    assert counts == [(3, 2), (4, 4), (2, 1)]


def test_chance_is_the_same_for_the_same_seed(client: http.client.HTTPConnection, proxy: Any):
    def outcomes(seed: int) -> list[int]:
        rule = proxy.status(404, chance=0.5, seed=seed)
        statuses = [ask(client) for _ in range(12)]
        rule.remove()
        return statuses

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert set(outcomes(1)) == {200, 404}


def test_the_first_final_rule_decides(client: http.client.HTTPConnection, proxy: Any):
    watched = proxy.watch()
    first = proxy.status(500, times=1)
    second = proxy.status(503)

    assert [ask(client, "PUT", body=b"abc") for _ in range(2)] == [500, 503]
    assert (watched.hits, first.hits, second.seen) == (2, 1, 1)
    proxy.clear()
    assert ask(client) == 200
