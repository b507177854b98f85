"""Parts of the benchmark that measure others: the slower network, the load by others, and a search by rungs."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks import theirs
from benchmarks.process import OtherLoad
from benchmarks.rows.searches import halved
from benchmarks.server import Server
from benchmarks.shaping import BURST, TokenBucket
from benchmarks.theirs import KINDS, Kind

SPIN = "import time; until = time.time() + 1; all(time.time() < until for _ in iter(int, 1))"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])

    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


@pytest.fixture
def server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(("rate", "least"), [(1e9, 0.1), (2e6, 1.0)], ids=["fast", "slow"])
def test_a_slower_network_passes_every_byte_and_takes_its_time(server: int, rate: float, least: float) -> None:
    command = [sys.executable, "-m", "benchmarks.shaping", "127.0.0.1", str(server), "0.05", str(rate)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdin is not None
        assert front.stdout is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(front.stdout.readline()), timeout=30)
        body = os.urandom(1_000_000)
        began = time.monotonic()
        connection.request("POST", "/", body)
        answer = connection.getresponse().read()
        seconds = time.monotonic() - began
        connection.close()
        front.stdin.close()
    assert answer == body[::-1]
    assert seconds >= 0.9 * least, "a round trip to connect, one for the request, and both ways at the rate"
    assert front.returncode == 0


@pytest.mark.parametrize("resets", [True, False])
def test_room_is_made_on_a_server_that_earlier_processes_may_have_filled(
    s3_store: str, resets: bool, tmp_path: Path
) -> None:
    """Then after `max_bytes`. Without a command it is taken for empty."""
    server = Server(100, f"echo >> {tmp_path}/resets" if resets else None)
    generations = []
    for num_bytes in (60, 30, 30):
        server.expect(num_bytes)
        generations.append(server.generation)
    server.close()
    assert generations == ([2, 2, 3] if resets else [1, 1, 2])
    assert not resets or (tmp_path / "resets").read_text() == "\n\n"


def test_connections_share_one_bucket() -> None:
    now = 100.0
    bucket = TokenBucket(1000.0, clock=lambda: now)
    assert bucket.wait_for(500) == pytest.approx(0.5)
    assert bucket.wait_for(500) == pytest.approx(1.0), "after the other connection's"
    now = 200.0
    assert bucket.wait_for(1000) == pytest.approx(1.0 - BURST), "an idle minute saves no more than a burst"


def test_the_load_by_others_has_neither_descendants_nor_the_server() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        # The shell ends at once, and its child is no descendant of this process.
        shell = subprocess.run(["sh", "-c", "sleep 600 >&- 2>&- & echo $!"], check=True, capture_output=True, text=True)
        other = int(shell.stdout)
        try:
            seen = OtherLoad([], set)._look()
            assert child.pid not in seen
            assert os.getpid() not in seen
            assert other in seen
            assert other not in OtherLoad([], lambda: {other})._look()
            assert other not in OtherLoad(["sleep"], set)._look()
        finally:
            child.kill()
            os.kill(other, signal.SIGKILL)


def test_a_descendant_that_outlives_its_parent_is_none_of_the_others() -> None:
    """As a rank of a killed chunk, until it is reaped."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout
        child = int(shell.stdout.readline())
        load = OtherLoad([], set)
        shell.kill()
    try:
        assert child not in load._look()
        assert child in OtherLoad([], set)._look(), "the control: nobody has seen its parent"
    finally:
        os.kill(child, signal.SIGKILL)
        load.end()


def test_the_load_by_others_counts_their_processor_time() -> None:
    began, load = time.monotonic(), OtherLoad([], set)
    subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{SPIN}" >&- 2>&- &'], check=True)
    time.sleep(0.5)
    assert load.end() * (time.monotonic() - began) > 0.1


@pytest.mark.parametrize(
    ("eta", "winner", "chunks"),
    [
        pytest.param(4, "a", 4 + 1 * 15, id="one rung of four, then one alone"),
        pytest.param(2, "b", 4 + 2 * 1 + 1 * 14, id="two left after chunk 2"),
    ],
)
def test_a_search_by_rungs_trains_and_keeps_as_a_sweep_does(eta: int, winner: str, chunks: int) -> None:
    curves: dict[str, list[float | None]] = {
        "a": [1.0, 3.0, *[3.0] * 14],
        "b": [2.0, 2.0, *[2.0] * 14],
        "c": [3.0, 1.0, *[1.0] * 14],
        "d": [4.0, None, *[None] * 14],
    }
    assert halved(curves, eta) == (winner, chunks)


def test_what_cannot_run_here_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(theirs, "OPPONENTS", tmp_path / "build" / "opponents")
    assert KINDS["Lightning"].lacks == "pytorch_lightning is not in build/opponents; `make bench` installs it"
    assert Kind(told="", programs=(("no-such-program", "its-package"),)).lacks == "apt-get install its-package"
    assert KINDS["script"].lacks == ""
