"""What did not change is copied inside the store, and never from the checkpoint just before."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.checkpoint import retention
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore
from baton.errors import StoreError, UnavailableError
from baton.recipe.run import Keep
from baton.runs.run import Run
from baton.store.bundle import BundleWriter, CopySources, origin
from baton.store.manifest import Manifest
from baton.store.storage import Storage

FROZEN = b"frozen" * 1000
CHANGED = 400
"""Bytes of what differs in each checkpoint."""


class Steps:
    """Checkpoints with a file that changes and one that does not, until it is given other bytes."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage, self.folder = storage, folder
        self.store = CheckpointStore(Run(storage, "r"))
        self.frozen = FROZEN
        self.sent: dict[int, int] = {}

    def writer(self, step: int) -> BundleWriter:
        """Sends a checkpoint, and stops short of its manifest."""
        local = self.folder / f"local-{step}-{len(os.listdir(self.folder))}"
        (local / "shards").mkdir(parents=True)
        (local / "optimizer.pt").write_bytes(step.to_bytes(4) * (CHANGED // 4))
        (local / "shards" / "frozen.safetensors").write_bytes(self.frozen)
        before, writer = self.storage.sent, self.store.open_writer(step)
        writer.send(str(local))
        self.sent[step] = self.storage.sent - before
        return writer

    def commit(self, *steps: int, keep: Keep | None = None) -> list[Checkpoint]:
        """Commits checkpoints, with retention after each where it is given."""
        made = []
        for step in steps:
            made.append(self.store.commit(step, self.writer(step), CheckpointMeta(digest=f"state of {step}"))[0])
            if keep:
                retention.prune(self.store, keep)
        return made

    def path(self, step: int) -> str:
        """Returns where the file lies that does not change."""
        checkpoint = self.store.read(step)
        assert checkpoint
        return checkpoint.manifest.path(self.store.prefix(step), "shards/frozen.safetensors")

    def rot(self, step: int) -> None:
        """Flips a bit of it, where its bytes lie."""
        path = self.path(step)
        if self.storage.is_local:
            with open(self.storage.key(path), "r+b") as file:
                file.write(b"F")
        else:
            self.storage.write(path, b"F" + FROZEN[1:])


@pytest.fixture
def steps(store: str, tmp_path: Path) -> Steps:
    """A run in a store of either kind."""
    (tmp_path / "files").mkdir()
    return Steps(Storage(store), tmp_path / "files")


@pytest.fixture
def here(tmp_path: Path) -> Steps:
    """A run in a folder."""
    (tmp_path / "files").mkdir()
    return Steps(Storage(str(tmp_path / "store")), tmp_path / "files")


def test_from_the_third_on_only_what_changed_is_sent(steps: Steps):
    made = steps.commit(10, 20, 30, 40)

    assert [steps.sent[step] for step in (10, 20, 30, 40)] == [CHANGED + len(FROZEN)] * 2 + [CHANGED] * 2
    assert [steps.store.verify(checkpoint) for checkpoint in made] == [[]] * 4
    assert {entry["sha256"] for entry in made[-1].manifest.files.values()} == {
        hashlib.sha256(data).hexdigest() for data in ((40).to_bytes(4) * 100, FROZEN)
    }


def test_two_that_follow_each_other_share_no_bytes(here: Steps):
    here.commit(10, 20, 30, 40, 50)

    inodes = [os.stat(here.storage.key(here.path(step))).st_ino for step in (10, 20, 30, 40, 50)]
    assert inodes[0] == inodes[2] == inodes[4]
    assert inodes[1] == inodes[3] != inodes[0]


def test_what_damages_one_leaves_the_one_before_it_whole(here: Steps):
    made = here.commit(10, 20, 30, 40, keep=Keep(last=2, best=0))
    here.rot(40)

    assert here.store.verify(made[3]) != []
    assert here.store.verify(made[2]) == []


def test_after_damage_all_is_sent(steps: Steps):
    _, _, _, damaged = steps.commit(10, 20, 30, 40)
    steps.rot(40)
    with pytest.raises(Exception, match="is damaged"):
        steps.store.require_whole(damaged, steps.store.verify(damaged))

    for again in steps.commit(40, 50):
        assert steps.sent[again.step] == CHANGED + len(FROZEN)
        assert steps.store.verify(again) == []


def test_a_file_that_changes_after_all_is_sent(steps: Steps):
    steps.commit(10, 20)
    steps.frozen = b"Frozen" * 1000
    (changed,) = steps.commit(30)
    assert steps.sent[30] == CHANGED + len(FROZEN)
    assert "origin" not in changed.manifest.files["shards/frozen.safetensors"]
    assert steps.store.verify(changed) == []


@pytest.mark.parametrize("keep", [Keep(last=2, best=0), Keep(last=1, best=0, every=40)], ids=["two", "holes"])
def test_whatever_stays_the_two_newest_share_no_bytes(keep: Keep, here: Steps):
    for step in range(10, 120, 10):
        here.commit(step, keep=keep)
        newest = itertools.islice(here.store.committed(), 2)
        origins = [origin(checkpoint.manifest, "shards/frozen.safetensors") for checkpoint in newest]
        assert len(set(origins)) == len(origins)
        assert all(here.store.verify(checkpoint) == [] for checkpoint in here.store.committed())


def test_retention_takes_a_source_and_leaves_its_copies(steps: Steps):
    *_, copy = steps.commit(10, 20, 30, keep=Keep(last=1, best=0, every=10))
    retention.prune(steps.store, Keep(last=1, best=0))

    assert [checkpoint.step for checkpoint in steps.store.committed()] == [30]
    assert origin(copy.manifest, "shards/frozen.safetensors") != copy.manifest.folder
    assert steps.store.verify(copy) == []


def test_a_source_that_is_gone_is_sent(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    steps.commit(10, 20)
    real = steps.storage.copy

    def late(source: str, path: str, size: int) -> bool:
        steps.storage.remove(source)
        return real(source, path, size)

    monkeypatch.setattr(steps.storage, "copy", late)
    (made,) = steps.commit(30)
    assert steps.sent[30] == CHANGED + len(FROZEN)
    assert steps.store.verify(made) == []


def test_a_source_of_another_size_is_not_copied_and_not_written_over(steps: Steps):
    steps.commit(10, 20)
    torn = steps.path(10)
    steps.storage.write(torn, FROZEN[:-1])

    (made,) = steps.commit(30)
    assert steps.sent[30] == CHANGED + len(FROZEN)
    assert steps.store.verify(made) == []
    assert steps.storage.size(torn) == len(FROZEN) - 1


@pytest.mark.parametrize("error", [StoreError("access denied."), UnavailableError("it takes too long.")])
def test_what_a_store_does_not_copy_is_sent(error: StoreError, here: Steps, monkeypatch: pytest.MonkeyPatch):
    here.commit(10, 20)

    def refuse(*_: object) -> bool:
        raise error

    monkeypatch.setattr(here.storage, "copy", refuse)
    (made,) = here.commit(30)
    assert here.sent[30] == CHANGED + len(FROZEN)
    assert here.store.verify(made) == []


def test_a_copy_of_damage_is_found_when_it_is_read_back(here: Steps):
    """Nobody has read the source since it rotted: its copy is no better, and the one between them is."""
    here.commit(10, 20)
    here.rot(10)
    _, copy = here.commit(30), here.store.read(30)
    between = here.store.read(20)

    assert copy
    assert between
    assert any("shards/frozen.safetensors: SHA-256 is" in line for line in here.store.verify(copy))
    assert here.store.verify(between) == []


def test_a_writer_that_dies_after_its_copies_leaves_what_retention_takes(here: Steps):
    here.commit(10, 20)
    dead = here.writer(30)
    here.commit(40)
    for parent, _, names in os.walk(here.storage.key(f"{here.store.prefix(30)}/{dead.folder}")):
        for name in names:
            os.utime(os.path.join(parent, name), (0, 0))  # of the copies' sources, too
    retention.prune(here.store, Keep(last=9, best=0))

    assert not any(name.startswith(dead.folder) for name in here.storage.find(here.store.prefix(30)))
    assert all(here.store.verify(checkpoint) == [] for checkpoint in here.store.committed())


def test_an_upload_with_copies_is_as_old_as_what_was_sent(here: Steps):
    """A hard link has its source's age."""
    here.commit(10, 20)
    for step in (10, 20):
        os.utime(here.storage.key(here.path(step)), (0, 0))
    writer = here.writer(30)
    here.commit(40)

    assert retention.prune(here.store, Keep(last=9, best=0)) == []
    assert here.store.commit(30, writer, CheckpointMeta(digest="state of 30"))[1]


def manifest(folder: str, **files: tuple[int, str, str | None]) -> tuple[str, Manifest]:
    """Returns a bundle whose files have these sizes, hashes and origins."""
    entries = {
        name: {"size": size, "sha256": sha256, **({"origin": whose} if whose else {})}
        for name, (size, sha256, whose) in files.items()
    }
    return f"p/{folder}", Manifest(kind="k", folder=folder, files=entries)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bundles", "expected"),
    [
        ([], []),
        ([manifest("b", f=(1, "x", None))], []),
        ([manifest("c", f=(1, "x", None)), manifest("b", f=(1, "x", None))], ["b"]),
        ([manifest("c", f=(1, "x", "b")), manifest("b", f=(1, "x", None))], []),
        ([manifest("c", f=(1, "x", "a")), manifest("b", f=(1, "x", "a")), manifest("a", f=(1, "x", None))], []),
        ([manifest("c", f=(1, "x", "a")), manifest("b", f=(1, "x", None)), manifest("a", f=(1, "x", None))], ["b"]),
        ([manifest("c", f=(1, "x", None)), manifest("b", f=(1, "y", None))], []),
        ([manifest("c", f=(2, "x", None)), manifest("b", f=(1, "x", None))], []),
        ([manifest("c", g=(1, "x", None)), manifest("b", f=(1, "x", None))], []),
        ([manifest("c", f=(1, "x", None)), manifest("b"), manifest("a", f=(1, "x", "z"))], ["z"]),
    ],
    ids=["none", "the last alone", "two", "one origin", "all one", "apart", "changing", "size", "name", "not in all"],
)
def test_what_a_file_may_be_a_copy_of(bundles: list[tuple[str, Manifest]], expected: list[str]):
    assert [source.origin for source in CopySources(bundles).sources("f", 1)] == expected


def test_what_changes_each_time_is_not_hashed_for_it(here: Steps, monkeypatch: pytest.MonkeyPatch):
    here.commit(10, 20)
    hashed: list[str] = []
    real: Callable[..., str] = BundleWriter._copied

    def note(self: BundleWriter, name: str, *rest: object) -> str:
        hashed.append(name)
        return real(self, name, *rest)

    monkeypatch.setattr(BundleWriter, "_copied", note)
    here.commit(30)
    assert hashed == ["shards/frozen.safetensors"]
