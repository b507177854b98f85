"""Users with few rights: what they may do works, and what not is named with the statement that it needs."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from baton import doctor
from baton.data import readers
from baton.errors import UserError
from baton.runs import run as failures
from baton.runs.outcomes import RunFailure
from baton.runs.run import Run
from baton.store import bundle, sources, storage
from baton.store.manifest import read_manifest
from baton.store.protocol import DeniedError
from baton.store.storage import Storage

pytestmark = pytest.mark.s3
ALL = frozenset({"s3:GetObject", "s3:PutObject", "s3:ListBucket", "s3:DeleteObject"})
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
DENIED_EACH = "<Error><Key>{}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Policy(ThreadingHTTPServer):
    """Stands before a server and holds its user to what AWS would, for one policy.

    Attributes:
        allowed: Actions.
        below: Where: the beginning of all keys and of the prefixes of listings; empty for the whole bucket.
        honours_conditions: Whether a put that is to be the first one is told apart.
    """

    daemon_threads = True
    upstream: str
    allowed: frozenset[str] = ALL
    below: str = "p/"
    honours_conditions = True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Policy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        removes = self.command == "POST" and "delete" in query
        if removes:
            key = unquote(re.findall(r"<Key>([^<]*)</Key>", body.decode())[0])
        action, where = "s3:PutObject", key
        if removes or self.command == "DELETE":
            action = "s3:DeleteObject"
        elif self.command in ("GET", "HEAD"):
            action, where = ("s3:GetObject", key) if key else ("s3:ListBucket", query.get("prefix", [""])[0])
        if action not in self.server.allowed or not where.startswith(self.server.below):
            each = f"<DeleteResult>{DENIED_EACH.format(key)}</DeleteResult>".encode()
            self._answer(200, each, {}) if removes else self._answer(403, DENIED, {})
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "if-none-match"}
        if self.server.honours_conditions:
            headers = dict(self.headers.items())
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        status, answered = answer.status, answer.read()
        may_list_all = "s3:ListBucket" in self.server.allowed and not self.server.below
        if status == 404 and key and not may_list_all:
            status, answered = 403, DENIED  # as AWS does: whether there is such a key is none of this user's business
        self._answer(status, answered, dict(answer.getheaders()))
        upstream.close()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        length = {name.lower(): value for name, value in headers.items()}.get("content-length", "0")
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "date", "server", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and status == 200 else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def policy(s3_store: str, s3_credentials: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    """A policy that still allows all below `p/`, and the environment that reaches the bucket through it."""
    import s3fs

    server = Policy(("127.0.0.1", 0), Handler)
    server.upstream = urlsplit(s3_credentials["AWS_ENDPOINT_URL"]).netloc
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()


def upload(store: Storage, file: str) -> None:
    store.upload(file, "k")


NEEDS: dict[str, tuple[str, Callable[[Storage, str], object]]] = {
    "write": ("s3:PutObject", lambda store, file: store.write("k", b"")),
    "create": ("s3:PutObject", lambda store, file: store.create("k", b"")),
    "upload": ("s3:PutObject", upload),
    "check": ("s3:PutObject", lambda store, file: store.check()),
    "read": ("s3:GetObject", lambda store, file: store.read("there")),
    "download": ("s3:GetObject", lambda store, file: store.download("there", f"{file}.back", 4)),
    "sha256": ("s3:GetObject", lambda store, file: store.sha256("there")),
    "rows": ("s3:GetObject", lambda store, file: list(readers.blocks(sources.SourceFile(store, "there")))),
    "list": ("s3:ListBucket", lambda store, file: store.list("a")),
    "find": ("s3:ListBucket", lambda store, file: store.find("a")),
    "a folder of rows": ("s3:ListBucket", lambda store, file: sources.files([store.uri("a")])),
    "what may be missing": ("s3:ListBucket", lambda store, file: store.exists("not-there")),
}


@pytest.mark.parametrize(("action", "use"), NEEDS.values(), ids=NEEDS)
def test_a_right_that_is_missing_is_named_with_its_statement(
    action: str, use: Callable[[Storage, str], object], policy: Policy, s3_store: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"here")
    store = Storage(f"{s3_store}/p", patience=0)
    store.write("there", b"here")
    policy.allowed = ALL - {action}
    with pytest.raises(DeniedError) as caught:
        use(store, str(tmp_path / "file"))

    error = caught.value
    assert "access denied (" in error.message
    assert re.search(r" for (PUT|GET|HEAD|\w+Object\w*)", error.message)
    assert "\n" not in str(error)
    statements = [json.loads(found) for found in re.findall(r"Allow it: (\{.*?\})\.(?: |$)", str(error.remedy))]
    (needed,) = [statement for statement in statements if statement["Action"] == action]
    bucket = f"arn:aws:s3:::{s3_store.removeprefix('s3://')}"
    assert needed["Resource"] == (bucket if action == "s3:ListBucket" else f"{bucket}/p/*")


def test_who_may_list_below_a_prefix_alone_is_told_what_is_missing(
    policy: Policy, s3_store: str, tmp_path: Path
) -> None:
    """S3 answers 403 for a key that is not there to who may not list the whole bucket."""
    store = Storage(f"{s3_store}/p", patience=0)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_bytes(b"1")

    assert not store.exists("a/none")
    assert store.list("a") == []
    for read in (
        lambda: store.read("a/none"),
        lambda: store.download("a/none", str(tmp_path / "back"), 1),
        lambda: store.sha256("a/none"),
        lambda: store.copy("a/none", "a/copy", 1),
        lambda: list(readers.blocks(sources.SourceFile(store, "a/none.jsonl"))),
    ):
        with pytest.raises(FileNotFoundError):
            read()
    with pytest.raises(UserError, match="matches no file"):
        sources.files([store.uri("a/none.jsonl")])
    manifest, ours = bundle.publish(store, "bundle", str(tmp_path / "files"), kind="k", meta={})
    assert ours
    assert read_manifest(store, "bundle") == manifest
    bundle.fetch(store, "bundle", manifest, str(tmp_path / "fetched"))
    assert (tmp_path / "fetched" / "one").read_bytes() == b"1"


@pytest.mark.parametrize(
    "honours_conditions",
    [pytest.param(True, id="conditional put"), pytest.param(False, id="lease", marks=pytest.mark.slow)],
)
def test_what_works_without_removing_works(
    honours_conditions: bool, policy: Policy, s3_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LEASE_SETTLE_S", 0.1)
    policy.allowed, policy.honours_conditions = ALL - {"s3:DeleteObject"}, honours_conditions
    store = Storage(f"{s3_store}/p", patience=0)

    store.check()
    assert store.has_conditional_put == honours_conditions
    assert [store.create("once", data) for data in (b"1", b"2")] == [True, False]
    assert store.read("once") == b"1"
    assert store.cannot_remove is not None
    assert "s3:DeleteObject" in str(store.cannot_remove.remedy)
    assert not store.remove("once")
    assert store.read("once") == b"1"

    run = Run(store, "r")
    run.write(RunFailure(stage="train chunk 1", message="it fell"))
    failures.clear_failure(run, "train chunk 1")
    assert run.read(RunFailure) is None


RIGHTS = {
    "all": (ALL, "store: rights", "ok"),
    "not write": (ALL - {"s3:PutObject"}, "store: right to write", "problem"),
    "not read": (ALL - {"s3:GetObject"}, "store: right to read", "problem"),
    "not list": (ALL - {"s3:ListBucket"}, "store: right to list", "problem"),
    "not remove": (ALL - {"s3:DeleteObject"}, "store: right to remove", "note"),
}


@pytest.mark.parametrize(("allowed", "name", "state"), RIGHTS.values(), ids=RIGHTS)
def test_the_doctor_tries_each_right(
    allowed: frozenset[str], name: str, state: str, policy: Policy, s3_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LARGE", 100_000)
    monkeypatch.setattr(doctor, "SLOW", 0.0)
    policy.allowed = allowed
    checks: dict[str, Any] = {check.name: check for check in doctor.examine_store(f"{s3_store}/p")}

    assert [each for each in checks if each.startswith("store: right")] == [name]
    assert checks[name].state == state
    for action in ALL - allowed:
        assert action in checks[name].remedy
    assert all(check.state == "ok" for check in checks.values()) == (state == "ok")
    if state == "note":  # what is tried stays there: nothing large is
        assert "store: large objects" not in checks
        assert all(check.state == "ok" for check in checks.values() if check.name != name)
