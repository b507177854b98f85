"""A proxy in front of an S3 server that does to requests what networks and stores do on bad days."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack
from urllib.parse import urlsplit

Side = Literal["request", "answer"]


class Match(TypedDict, total=False):
    """Which requests a rule is for: those that meet all of what is given.

    Attributes:
        methods: One method or several.
        path: Part of the path and query, as sent or with its `%` escapes undone.
        pattern: A regular expression found there.
        header: A header that is present.
        skip: How many matching requests to let by first.
        times: How many to strike at most.
        chance: How probable each strike is.
        seed: What decides which.
    """

    methods: str | Sequence[str]
    path: str
    pattern: str
    header: str
    skip: int
    times: int | None
    chance: float
    seed: int


class Rule:
    """A rule in force in a proxy."""

    def __init__(self, proxy: FaultyProxy, number: int) -> None:
        self._proxy = proxy
        self._number = number

    @property
    def seen(self) -> int:
        """How many requests matched."""
        return self._counts()[0]

    @property
    def hits(self) -> int:
        """How many of them it struck."""
        return self._counts()[1]

    @property
    def held(self) -> int:
        """How many it holds right now."""
        return self._counts()[2]

    def _counts(self) -> list[int]:
        counts: list[int] = self._proxy.command("counts", self._number)
        return counts

    def wait_held(self, count: int = 1, timeout: float = 10) -> None:
        """Return once it holds this many requests.

        Raises:
            TimeoutError: it did not in time.
        """
        self._wait(2, count, timeout)

    def wait_hits(self, count: int = 1, timeout: float = 10) -> None:
        """Return once it struck this many requests.

        Raises:
            TimeoutError: it did not in time.
        """
        self._wait(1, count, timeout)

    def _wait(self, which: int, count: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._counts()[which] < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rule {self._number} has seen, struck and holds {self._counts()}, not {count}")
            time.sleep(0.005)

    def release(self, count: int | None = None) -> None:
        """Let the requests held longest go on, or all that are held; those yet to come are held again."""
        self._proxy.command("release", self._number, count)

    def remove(self) -> None:
        """End the rule: what it holds goes on. Its counts stay."""
        self._proxy.command("remove", self._number)


class FaultyProxy:
    """A proxy in a process of its own.

    Each request meets the rules in the order they were made; all that match apply, up to the first that
    settles its fate (`status`, `reset`, `short`, `lost_answer`, `refuse`, `stall` without end). Without rules it
    passes everything on as it is, but for `Connection` headers: it keeps a client's connection even if
    upstream closes its own. The `Host` header is upstream's to believe, so signatures stay valid.

    An offset `after` counts bytes of the body's data. A body shorter than that is struck just before its
    last byte, and an empty one before its head, so that a rule that hits always shows.

    Args:
        upstream_endpoint: The server's address, `http://HOST:PORT`.

    Attributes:
        endpoint: The proxy's address.
    """

    def __init__(self, upstream_endpoint: str) -> None:
        if urlsplit(upstream_endpoint).scheme != "http":
            raise ValueError(f"{upstream_endpoint!r} is not an http:// address")
        # It needs nothing installed, and starts in half the time without.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-m", "tests.faults.server", upstream_endpoint],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        ports = self._process.stdout.readline()
        if not ports:
            raise RuntimeError("the proxy ended before it listened")
        port, self._control = json.loads(ports)
        self.endpoint = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        # A fork of this process may hold the other end of the input open.
        self._process.terminate()
        self._process.wait(10)

    def command(self, name: str, *arguments: Any) -> Any:
        """Have the process do something; any process may that can reach it.

        Raises:
            RuntimeError: it did not; its own message is on its stderr.
        """
        with (
            socket.create_connection(("127.0.0.1", self._control), timeout=10) as control,
            control.makefile("rw") as file,
        ):
            file.write(json.dumps([name, *arguments]) + "\n")
            file.flush()
            if not (answer := file.readline()):
                raise RuntimeError(f"the proxy did not {name} {arguments}")
            return json.loads(answer)

    def clear(self) -> None:
        """End all rules, let go of what they hold, and listen."""
        self.command("clear")

    def requests(self) -> list[str]:
        """Returns the requests that came (the last ten thousand), oldest first, as in `PUT /bucket/key`."""
        requests: list[str] = self.command("requests")
        return requests

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Refuse connections, and reset those there are, within the block."""
        self.command("refuse")
        try:
            yield
        finally:
            self.command("listen")

    def _add(self, kind: str, match: Match, **options: Any) -> Rule:
        methods = match.get("methods", ())
        re.compile(match.get("pattern", ""))
        chosen = {**match, "methods": [methods] if isinstance(methods, str) else list(methods)}
        return Rule(self, self.command("add", {"kind": kind, **options, **chosen}))

    def watch(self, **match: Unpack[Match]) -> Rule:
        """Count, and do nothing."""
        return self._add("watch", match)

    def status(self, code: int, error: str = "", **match: Unpack[Match]) -> Rule:
        """Answer with a status and an S3 error in XML; upstream hears nothing.

        Args:
            code: Such as 403, 404, 500, 502 or 503. With 200, the error is in the body only, as S3 may answer a copy.
            error: S3's name for it, instead of the usual one for the status (503 is `SlowDown`).
            match: The requests.
        """
        return self._add("status", match, code=HTTPStatus(code), name=error)

    def reset(self, after: int | None = None, of: Side = "answer", **match: Unpack[Match]) -> Rule:
        """Reset the connection.

        Args:
            after: After so many bytes of the body of `of`; None is at once, and upstream hears nothing.
            of: Whose body. Bytes of a request reach upstream, and then an end.
            match: The requests.
        """
        return self._add("reset", match, after=after, of=of)

    def stall(
        self, seconds: float | None = None, after: int | None = None, of: Side = "answer", **match: Unpack[Match]
    ) -> Rule:
        """Say nothing, with the connection open.

        Args:
            seconds: How long until it goes on; None is until the rule ends or lets go, and then comes a reset.
            after: After so many bytes of the body of `of`; None is before upstream hears of the request.
            of: Whose body.
            match: The requests.
        """
        return self._add("stall", match, seconds=seconds, after=after, of=of)

    def short(self, after: int = 0, **match: Unpack[Match]) -> Rule:
        """Close as if all had been said after so many bytes of an answer that announced more."""
        return self._add("short", match, after=after)

    def lost_answer(self, **match: Unpack[Match]) -> Rule:
        """Let upstream do it, and reset the connection instead of passing the answer on."""
        return self._add("lost_answer", match)

    def refuse(self, seconds: float | None = None, **match: Unpack[Match]) -> Rule:
        """When such a request comes, reset all connections and refuse new ones; see also `outage`.

        Args:
            seconds: How long; None is until `clear`.
            match: The requests.
        """
        return self._add("refuse", match, seconds=seconds)

    def latency(self, seconds: float, **match: Unpack[Match]) -> Rule:
        """Wait before upstream hears of the request."""
        return self._add("latency", match, seconds=seconds)

    def rate(self, bytes_per_second: float, **match: Unpack[Match]) -> Rule:
        """Pass bodies of requests and answers on no faster than this; of several rules, the slowest counts."""
        return self._add("rate", match, rate=bytes_per_second)

    def drop_header(self, name: str, **match: Unpack[Match]) -> Rule:
        """Leave a header out; a server that checks signatures refuses the request if that header was signed."""
        return self._add("drop_header", match, name=name)

    def corrupt(self, at: int = 0, of: Side = "answer", **match: Unpack[Match]) -> Rule:
        """Flip a bit of the body's byte at an offset (of the last one if it has fewer)."""
        return self._add("corrupt", match, after=at, of=of)

    def pause_at(self, of: Side = "request", **match: Unpack[Match]) -> Rule:
        """Hold requests until the test calls `release`.

        A request that is let go reaches upstream even if its client gave up meanwhile, if it had sent it all.

        Args:
            of: Whether to hold the request, before upstream hears of it, or the answer.
            match: The requests.
        """
        return self._add("pause", match, of=of)
