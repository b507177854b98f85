"""Put-if-absent on a store that has none: one writer wins, and nobody waits for one that is gone."""

import threading
import time
from typing import Any

import pytest
from obstore.exceptions import PermissionDeniedError

from baton.store import storage as lease
from baton.store.clouds import S3, CloudStore
from baton.store.storage import Storage

pytestmark = pytest.mark.s3


@pytest.fixture
def plain_s3(faulty_s3: Any) -> Any:
    """A bucket on a server that takes `If-None-Match` for nothing."""
    faulty_s3.proxy.drop_header("If-None-Match")
    return faulty_s3


def test_the_server_alone_would_let_both_write(plain_s3: Any):
    client = CloudStore(plain_s3.store, S3)

    assert client.create("key", b"first")
    assert client.create("key", b"second")
    assert not Storage(plain_s3.store).has_conditional_put


@pytest.mark.parametrize("repeat", range(2))
def test_sixteen_create_and_one_wins(repeat: int, plain_s3: Any):
    barrier, won, failures = threading.Barrier(16), [], []
    storages = [Storage(plain_s3.store, patience=300) for _ in range(16)]
    assert not storages[0].has_conditional_put

    def create(number: int) -> None:
        barrier.wait()
        try:
            if storages[number].create("a/contested", b"%d" % number * 100):
                won.append(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert len(won) == 1
    assert storages[0].read("a/contested") == b"%d" % won[0] * 100
    assert list(storages[0].find("a")) == ["contested"]


def test_a_store_notices_by_itself_that_it_needs_a_lease(plain_s3: Any):
    storage = Storage(plain_s3.store)

    assert storage.create("a/one", b"first")
    assert not storage.create("a/one", b"second")
    assert storage.read("a/one") == b"first"
    assert list(storage.find("")) == ["a/one"]


def test_a_server_that_refuses_the_condition_gets_a_lease_too(faulty_s3: Any):
    faulty_s3.proxy.status(501, "NotImplemented", header="If-None-Match")
    storage = Storage(faulty_s3.store)

    assert storage.create("one", b"first")
    assert not storage.create("one", b"second")


def test_what_is_there_already_needs_no_lease(plain_s3: Any):
    storage = Storage(plain_s3.store)
    storage.write("one", b"first")

    assert not storage.create("one", b"second")
    assert [request for request in plain_s3.proxy.requests() if ".lease" in request] == []


def test_a_lease_of_a_writer_that_died_is_taken_over(plain_s3: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    monkeypatch.setattr(lease, "LEASE_SETTLE_S", 0.1)
    storage = Storage(plain_s3.store)
    storage.write("one.lease", b"one that died")
    began = time.monotonic()

    assert storage.create("one", b"first")

    assert time.monotonic() - began > 2.0
    assert list(storage.find("")) == ["one"]


def test_a_lease_that_is_good_is_respected(plain_s3: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    monkeypatch.setattr(lease, "LEASE_SETTLE_S", 0.1)
    storage = Storage(plain_s3.store)
    storage.write("one.lease", b"A")

    def live() -> None:
        """Do as writers do that take turns, of which none holds the lease for as long as it is good for."""
        for holder in (b"B", b"C"):
            time.sleep(0.7)
            storage.write("one.lease", holder)
        time.sleep(0.5)
        storage.write("one", b"theirs")

    other = threading.Thread(target=live)
    other.start()
    ours = storage.create("one", b"ours")
    other.join()

    assert not ours
    assert storage.read("one") == b"theirs"


class Slow(CloudStore):
    """A client that is stopped before its write for so long that another takes its lease."""

    def write(self, key: str, data: bytes) -> None:
        if not key.endswith(".lease"):
            super().write(f"{key}.lease", b"another")
        super().write(key, data)


def test_a_writer_that_was_stopped_leaves_the_next_ones_lease_alone(plain_s3: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "LEASE_SETTLE_S", 0.05)
    client = Slow(plain_s3.store, S3)

    lease.create_leased(client, "one", b"late")

    assert client.read("one.lease") == b"another"


def test_a_failed_write_gives_the_lease_back(plain_s3: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "LEASE_SETTLE_S", 0.05)
    refusal = plain_s3.proxy.status(403, methods="PUT", pattern=r"/one(\?|$)")
    client = CloudStore(plain_s3.store, S3)

    with pytest.raises(PermissionDeniedError):
        lease.create_leased(client, "one", b"1")
    refusal.remove()

    assert client.find("") == {}
