"""Orders of events in which the store's code did harm once, each by itself, on a folder."""

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint import retention
from baton.checkpoint.restore import Restorer, require_usable
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore
from baton.errors import DamagedError, UnavailableError
from baton.recipe.run import Keep
from baton.runs.documents import CheckpointRef, Promoted, ProofPart
from baton.runs.run import Run
from baton.runtime import Runtime
from baton.store import bundle, storage
from baton.store.folder import Folder
from baton.store.protocol import ObjectInfo
from baton.store.storage import Storage

ONE = Keep(last=1, best=0)


class Interrupted(Folder):
    """A client before whose calls other processes do something, once."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.before: dict[tuple[str, str], Callable[[], object]] = {}
        self.unlisted: tuple[str, ...] = ()

    def _others(self, kind: str, path: str) -> None:
        for key in [key for key in self.before if key[0] == kind and path.endswith(key[1])]:
            self.before.pop(key)()

    def read(self, path: str) -> bytes:
        self._others("read", path)
        return super().read(path)

    def size(self, path: str) -> int | None:
        self._others("size", path)
        return super().size(path)

    def blocks(self, path: str) -> Iterator[bytes]:
        self._others("blocks", path)
        return super().blocks(path)

    def create(self, path: str, data: bytes) -> bool:
        is_made = super().create(path, data)
        self._others("created", path)
        return is_made

    def remove(self, path: str) -> None:
        self._others("remove", path)
        super().remove(path)

    def find(self, path: str) -> dict[str, ObjectInfo]:
        return {
            name: entry for name, entry in super().find(path).items() if not name.endswith(self.unlisted or ("\0",))
        }


class Ahead(Runtime):
    """A machine whose clock is two hours ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=2)


class Stopping(Runtime):
    """A machine whose time a test decides."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Distant(Folder):
    """A client whose requests take a while: those to read, to ask for a size, and to write."""

    def __init__(self, uri: str, runtime: Runtime, read: float, size: float, write: float) -> None:
        super().__init__(uri)
        self.runtime = runtime
        self.seconds = {"read": read, "size": size, "write": write}

    def read(self, path: str) -> bytes:
        self.runtime.sleep(self.seconds["read"])
        return super().read(path)

    def size(self, path: str) -> int | None:
        self.runtime.sleep(self.seconds["size"])
        return super().size(path)

    def write(self, path: str, data: bytes) -> None:
        self.runtime.sleep(self.seconds["write"])
        super().write(path, data)


@pytest.fixture
def client(tmp_path: Path) -> Interrupted:
    return Interrupted(str(tmp_path / "store"))


@pytest.fixture
def store(client: Interrupted) -> CheckpointStore:
    return CheckpointStore(Run(Storage(client.uri, client=client), "r"))


@pytest.fixture
def others(client: Interrupted) -> CheckpointStore:
    """The same checkpoints as other processes see them."""
    return CheckpointStore(Run(Storage(client.uri), "r"))


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[CheckpointStore, int], Checkpoint]:
    def make(store: CheckpointStore, step: int) -> Checkpoint:
        local = tmp_path / f"local-{len(os.listdir(tmp_path))}"
        local.mkdir()
        (local / "trainer_state.json").write_text(json.dumps({"log_history": []}))
        writer = store.open_writer(step)
        writer.send(str(local))
        return store.commit(step, writer, CheckpointMeta(digest=f"state {step}", identity="same"))[0]

    return make


def test_a_clock_that_is_ahead_takes_no_upload_from_under_its_writer(client: Any, commit: Any, tmp_path: Path):
    ahead = CheckpointStore(Run(Storage(client.uri, runtime=Ahead()), "r"))
    writer = ahead.open_writer(10)
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "weights.bin").write_bytes(b"1")
    writer.send(str(tmp_path / "sent"))
    commit(ahead, 20)

    assert retention.prune(ahead, ONE) == []


def test_a_restore_looks_again_where_retention_took_what_it_had_listed(
    client: Any, store: Any, others: Any, commit: Any, tmp_path: Path
):
    commit(others, 10)

    def zombie() -> None:
        commit(others, 20)
        retention.prune(others, ONE)

    client.before["read", "step-00000010/manifest.json"] = zombie
    restored = Restorer(store, 30, "same", None, lambda size: str(tmp_path / "in")).fetch()

    assert restored is not None
    assert restored.step == 20


def test_a_listing_that_lags_makes_no_damage(client: Any, store: Any, others: Any, commit: Any):
    checkpoint = commit(others, 10)
    client.unlisted = ("trainer_state.json",)

    require_usable(store, checkpoint)

    assert bundle.torn_files(store.storage, store.prefix(10), checkpoint.manifest) == []
    assert others.newest() == checkpoint


def test_a_listing_that_lags_takes_nothing_that_is_to_stay(client: Any, store: Any, others: Any, commit: Any):
    first = commit(others, 10)
    commit(others, 20)
    client.unlisted = (f"{first.manifest.folder}/trainer_state.json",)

    assert retention.prune(store, Keep(last=2, best=0)) == []
    assert [checkpoint.step for checkpoint in others.whole()] == [20, 10]


def test_a_removal_leaves_the_one_before_what_was_found_damaged_meanwhile(store: Any, others: Any, commit: Any):
    first, second = commit(others, 10), commit(others, 20)
    (removal,) = retention.removals(store, ONE)
    with pytest.raises(DamagedError):
        others.require_whole(second, ["a bit of it"])

    assert not retention._take(store, removal)
    assert others.newest() == first


def test_a_removal_leaves_what_has_the_name_again(store: Any, others: Any, commit: Any):
    for step in (10, 20):
        commit(others, step)
    (removal,) = retention.removals(store, ONE)
    retention.prune(others, ONE)
    again = commit(others, 10)

    assert not retention._take(store, removal)
    assert others.read(10) == again


def test_a_removal_that_is_tried_again_leaves_what_was_trained_meanwhile(
    client: Any, store: Any, others: Any, commit: Any
):
    first, second = commit(others, 10), commit(others, 20)
    again = []

    def meanwhile() -> None:
        others.storage.remove(f"{others.prefix(10)}/manifest.json")  # the first try's answer was lost
        others.storage.write(f"{others.prefix(20)}/damaged-{second.manifest.folder}", b"")
        again.append(commit(others, 10))
        raise UnavailableError("The store does not answer.")

    client.before["remove", "step-00000010/manifest.json"] = meanwhile

    assert retention.prune(store, ONE) == []
    assert others.newest() == again[0] != first


def test_a_removal_leaves_an_upload_whose_writer_has_awoken(store: Any, commit: Any, tmp_path: Path):
    writer = store.open_writer(10)
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "weights.bin").write_bytes(b"1")
    writer.send(str(tmp_path / "sent"))
    os.utime(store.storage.key(f"{store.prefix(10)}/{writer.folder}/weights.bin"), (0, 0))
    commit(store, 20)
    (removal,) = retention.removals(store, ONE)
    (tmp_path / "sent" / "log.json").write_bytes(b"1")
    writer.send(str(tmp_path / "sent"))

    assert not retention._take(store, removal)
    assert len(store.storage.find(f"{store.prefix(10)}/{writer.folder}")) == 2


def test_a_commit_that_retention_has_taken_is_not_made_again(client: Any, store: Any, others: Any, commit: Any):
    commit(others, 20)

    def is_lost() -> None:
        raise UnavailableError("The answer is lost.")

    client.before["created", "step-00000010/manifest.json"] = is_lost
    client.before["read", "step-00000010/manifest.json"] = lambda: retention.prune(others, ONE)
    commit(store, 10)

    assert others.storage.find(others.prefix(10)) == {}


def test_the_slower_of_two_checkpoint_stages_undoes_nothing(store: Any, commit: Any):
    for step in (20, 40):
        commit(store, step)
    part = {"digest": "", "chain": "", "level": "bitwise", "uri": "", "bytes": 1}
    store.run.write(ProofPart.model_validate({"step": 40, **part}), 2)
    store.run.write(Promoted(newest=CheckpointRef(step=20)))
    commit(store, 50)

    retention.prune(store, ONE, targets=(20, 40, 60))

    assert store.run.verified_step() == 40
    assert [checkpoint.step for checkpoint in store.committed()] == [50, 40, 20]


def test_the_holder_of_a_lease_that_was_stopped_does_not_write(client: Any):
    runtime = Stopping()

    def stopped() -> None:
        client.before["size", "one"] = lambda: runtime.sleep(20.0)

    client.before["read", "one.lease"] = lambda: client.before.update({("read", "one.lease"): stopped})
    with pytest.raises(UnavailableError, match="not held for long enough"):
        storage.create_leased(client, "one", b"late", runtime)

    assert Folder(client.uri).size("one") is None


LEASES: dict[str, tuple[tuple[float, float, float], bytes, float | str, set[str]]] = {
    "at once": ((0, 0, 0), b"", 0.5, {"one"}),
    "a slow store": ((0.1, 0.1, 0.1), b"", 1.3, {"one"}),
    "as quick as it must be for the short wait": ((0, 0, 0.5), b"", 1.5, {"one"}),
    "too slow for it": ((0.5, 0, 0.25), b"", 12.5, {"one"}),
    "as slow as is safe": ((2, 0, 3), b"", "not held for long enough", {"one.lease"}),
    "as slow as is safe, then quick": ((0, 0, 5), b"", 20.0, {"one"}),
    "slower": ((2, 0, 3.25), b"", "took 5.2 s to read and write; 5 are safe", {"one.lease"}),
    "stopped, and back in time": ((0, 4.5, 0), b"", 9.5, {"one"}),
    "stopped for too long": ((0, 4.75, 0), b"", "not held for long enough", {"one.lease"}),
    "stopped behind the long wait, and back in time": ((0, 3, 2), b"", 20.0, {"one"}),
    "stopped behind the long wait for too long": ((0, 3.25, 2), b"", "not held for long enough", {"one.lease"}),
    "one that died": ((0, 0, 0), b"other", 21.0, {"one"}),
}
"""Seconds that requests to read, for a size and to write take, the lease that is there, and what comes of it: after so
many seconds the object, or an error; and what is there then."""


@pytest.mark.parametrize(("seconds", "lease", "result", "left"), LEASES.values(), ids=LEASES)
def test_a_lease_is_waited_for_and_held_in_time(
    seconds: tuple[float, float, float], lease: bytes, result: float | str, left: set[str], client: Any
):
    runtime = Stopping()
    distant = Distant(client.uri, runtime, *seconds)
    if lease:
        client.write("one.lease", lease)
    if isinstance(result, str):
        with pytest.raises(UnavailableError, match=result):
            storage.create_leased(distant, "one", b"1", runtime)
    else:
        assert storage.create_leased(distant, "one", b"1", runtime)
        assert runtime.time == pytest.approx(result)
    assert client.find("").keys() == left


def test_what_retention_takes_between_put_and_look_was_written(client: Any):
    client.before["read", "one"] = lambda: Folder(client.uri).remove("one")

    assert storage.create_leased(client, "one", b"1", Stopping())
