"""What a store does on a bad day: transient faults pass unnoticed, permanent ones are one clear message."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, StoreError, UnavailableError
from baton.store import bundle, clouds, storage
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

pytestmark = pytest.mark.s3
MEGABYTE = 1_000_000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a few megabytes a large object, and pauses and patience with one request short."""
    monkeypatch.setattr(clouds, "PART", 5 * 1024 * 1024)
    monkeypatch.setattr(clouds, "RANGE", 5 * 1024 * 1024)
    monkeypatch.setattr(clouds, "READ_TIMEOUT", "1s")
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 0.2)


@pytest.fixture
def content(tmp_path: Path) -> tuple[str, str]:
    """A file of three parts and its SHA-256."""
    path = tmp_path / "content.bin"
    path.write_bytes(os.urandom(12 * MEGABYTE))
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


FAULTS: dict[str, Callable[[Any], Any]] = {
    "500 thrice": lambda proxy: proxy.status(500, times=3),
    "503 slow down, every third request": lambda proxy: proxy.status(503, "SlowDown", chance=0.33, seed=1, times=12),
    "429 twice": lambda proxy: proxy.status(429, times=2),
    "reset before an answer": lambda proxy: proxy.reset(times=2),
    "reset in a body sent": lambda proxy: proxy.reset(after=MEGABYTE, of="request", methods="PUT", times=2),
    "reset in a body received": lambda proxy: proxy.reset(after=MEGABYTE, methods="GET", times=2),
    "short body": lambda proxy: proxy.short(after=MEGABYTE, methods="GET", times=2),
    "no answer": lambda proxy: proxy.stall(methods="GET", times=1),
    "no end to a body": lambda proxy: proxy.stall(after=MEGABYTE, methods="GET", times=1),
    "answer lost": lambda proxy: proxy.lost_answer(methods="PUT", times=2),
    "slow to answer": lambda proxy: proxy.latency(0.1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_transient_fault_passes_unnoticed(
    fault: Callable[[Any], Any], faulty_s3: Any, content: tuple[str, str], tmp_path: Path
) -> None:
    path, digest = content
    store = Storage(faulty_s3.store, patience=20)
    rule = fault(faulty_s3.proxy)
    assert store.upload(path, "a/large") == digest
    store.write("a/small", b"small")
    assert store.download("a/large", str(tmp_path / "back"), os.path.getsize(path)) == digest
    assert store.read("a/small") == b"small"
    assert store.list("a") == ["large", "small"]
    assert (tmp_path / "back").read_bytes() == Path(path).read_bytes()
    assert rule.hits > 0


def test_an_object_has_no_more_parts_than_a_store_takes(
    faulty_s3: Any, content: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = content
    store, parts = Storage(faulty_s3.store), faulty_s3.proxy.watch(methods="PUT", path="partNumber=")
    assert store.upload(path, "a/large") == digest
    assert parts.seen == 3
    monkeypatch.setattr(clouds, "MOST_PARTS", 2)
    assert store.upload(path, "a/larger") == digest
    assert parts.seen == 3 + 2
    assert store.download("a/larger", str(tmp_path / "back"), os.path.getsize(path)) == digest


def test_a_bundle_whose_commit_was_done_but_not_answered_is_ours(faulty_s3: Any, content: tuple[str, str]) -> None:
    store = Storage(faulty_s3.store, patience=20)
    assert store.has_conditional_put
    rule = faulty_s3.proxy.lost_answer(methods="PUT", path="manifest.json", times=1)
    manifest, ours = bundle.publish(store, "p", os.path.dirname(content[0]), kind="k", meta={})
    assert rule.hits == 1
    assert ours
    assert read_manifest(store, "p") == manifest


def test_bytes_damaged_on_their_way_are_noticed(faulty_s3: Any, content: tuple[str, str], tmp_path: Path) -> None:
    store = Storage(faulty_s3.store, patience=5)
    store.upload(content[0], "large")
    faulty_s3.proxy.corrupt(methods="GET", times=1)
    assert store.download("large", str(tmp_path / "back"), os.path.getsize(content[0])) != content[1]


@pytest.mark.parametrize("patience", [0.0, 1.5])
def test_patience_has_an_end(patience: float, faulty_s3: Any) -> None:
    store = Storage(faulty_s3.store, patience=patience)
    with faulty_s3.proxy.outage():
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="cannot be reached"):
            store.read("a")
        assert time.monotonic() - began + 0.5 >= patience


PERMANENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "403": (lambda proxy: proxy.status(403), "access denied"),
    "no such bucket": (lambda proxy: proxy.status(404, "NoSuchBucket"), "bucket does not exist"),
}


@pytest.mark.parametrize(("fault", "message"), PERMANENT.values(), ids=PERMANENT)
def test_a_permanent_fault_is_one_message_at_once(
    fault: Callable[[Any], Any], message: str, faulty_s3: Any, content: tuple[str, str]
) -> None:
    store_patience = 60
    store = Storage(faulty_s3.store, patience=store_patience)
    rule = fault(faulty_s3.proxy)
    began = time.monotonic()
    for use in (lambda: store.write("a", b""), lambda: store.upload(content[0], "b"), lambda: store.create("c", b"")):
        with pytest.raises(StoreError, match=message) as caught:
            use()
        assert not isinstance(caught.value, UnavailableError)
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < store_patience
    assert rule.hits <= 12


def test_an_upload_ends_when_it_is_told_to(faulty_s3: Any, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(60 * MEGABYTE))
    store = Storage(faulty_s3.store, patience=60)
    faulty_s3.proxy.rate(2 * MEGABYTE)  # all of it would take 30 seconds
    began = time.monotonic()

    class ToldError(BatonError):
        pass

    def check() -> None:
        if time.monotonic() - began > 0.3:
            raise ToldError("stop")

    with pytest.raises(ToldError):
        store.upload(str(tmp_path / "large"), "large", check)
    assert time.monotonic() - began < 30
    assert store.list("") == []


def test_a_file_that_becomes_shorter_while_it_is_sent_is_an_error(faulty_s3: Any, content: tuple[str, str]) -> None:
    store, calls = Storage(faulty_s3.store, patience=1), itertools.count()

    def check() -> None:
        if next(calls) == 1:  # the first part has been read
            os.truncate(content[0], 6 * MEGABYTE)

    with pytest.raises(StoreError, match="became shorter while it was sent"):
        store.upload(content[0], "large", check)
    assert store.list("") == []


def test_a_store_without_conditional_put_is_noticed_and_still_has_one_winner(faulty_s3: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    faulty_s3.proxy.drop_header("If-None-Match")
    stores = [Storage(faulty_s3.store, patience=20) for _ in range(4)]
    assert not stores[0].has_conditional_put
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda store: store.create("contested", id(store).to_bytes(8)), stores))
    assert sum(won) == 1
    assert stores[0].read("contested") == id(stores[won.index(True)]).to_bytes(8)
    assert stores[0].list("") == ["contested"]
