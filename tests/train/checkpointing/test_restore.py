"""Which checkpoint a chunk resumes from, and which it does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import events
from baton.checkpoint.restore import Restorer, committed_at_target, usable_at_target
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.errors import ExactnessError
from baton.runs.run import Run
from baton.store.storage import Storage


class Mkdir:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Committed:
    """A run with checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = CheckpointStore(Run(Storage(str(folder / "store")), "r"))

    def commit(self, step: int, identity: str = "this", *, finished: bool = False, content: Any = None) -> None:
        """Commits a checkpoint of one pickle and some bytes."""
        local = self.folder / f"{step}-{len(os.listdir(self.folder))}"
        local.mkdir()
        torch.save({"step": step} if content is None else content, local / "state.pt")
        (local / "weights").write_bytes(b"w" * step)
        writer = self.store.open_writer(step)
        writer.send(str(local))
        self.store.commit(step, writer, CheckpointMeta(digest=f"of {step}", identity=identity, finished=finished))

    def spoil(self, step: int, *, cut: bool = False) -> None:
        """Turns a byte over, or takes it away."""
        checkpoint = self.store.read(step)
        assert checkpoint
        path = checkpoint.manifest.path(self.store.prefix(step), "weights")
        data = self.store.storage.read(path)
        self.store.storage.write(path, data[1:] if cut else b"x" + data[1:])

    def restorer(self, target: int) -> Restorer:
        """Returns what a chunk restores with."""
        return Restorer(self.store, target, "this", None, lambda _: str(self.folder))


@pytest.fixture
def committed(tmp_path: Path) -> Committed:
    return Committed(tmp_path)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(events, "emit", found.append)
    return found


def test_the_newest_before_the_target(committed: Committed) -> None:
    assert committed.restorer(9).fetch() is None
    for step in (2, 4, 6):
        committed.commit(step)
    restored = committed.restorer(6).fetch()
    assert restored
    assert (restored.step, restored.meta.digest, restored.is_target) == (4, "of 4", False)
    assert sorted(os.listdir(restored.folder)) == ["state.pt", "weights"]
    scored = committed.restorer(6).fetch(to_score=True)
    assert scored
    assert (scored.step, scored.is_target) == (6, True)
    before = committed.restorer(7).fetch(to_score=True)
    assert before
    assert (before.step, before.is_target) == (6, False)
    assert committed.restorer(2).fetch() is None


@pytest.mark.parametrize("name", ["too deep", "no hash", "a file in a file", "meta of no version"])
def test_a_manifest_that_is_none_is_passed_over_and_said(name: str, committed: Committed) -> None:
    for step in (2, 4):
        committed.commit(step)
    path = f"{committed.store.prefix(4)}/manifest.json"
    storage = committed.store.storage
    manifest = json.loads(storage.read(path))
    entry = manifest["files"]["weights"]
    match name:
        case "no hash":
            entry["sha256"] = "z" * 64
        case "a file in a file":
            manifest["files"]["weights/x"] = entry
        case "meta of no version":
            manifest["meta"]["version"] = "of :"
    storage.write(path, b"[" * 100_000 if name == "too deep" else json.dumps(manifest).encode())
    restorer = committed.restorer(9)

    restored = restorer.fetch()

    assert restored
    assert restored.step == 2
    assert len(restorer.skipped) == 1


def test_a_damaged_one_is_passed_over_and_said(committed: Committed, told: list[Any]) -> None:
    for step in (2, 4, 6):
        committed.commit(step)
    committed.spoil(6)
    committed.spoil(4, cut=True)
    restorer = committed.restorer(9)
    restored = restorer.fetch()
    assert restored
    assert restored.step == 2
    assert len(restorer.skipped) == 2
    assert "step-00000006 is damaged: weights: SHA-256 is" in restorer.skipped[0]
    assert "step-00000004 is damaged: weights: 3 bytes, committed were 4" in restorer.skipped[1]
    assert [(event.step, event.reason) for event in told] == list(zip((6, 4), restorer.skipped, strict=True))
    again = committed.restorer(9)
    assert again.fetch()
    assert ["was found damaged before" in reason for reason in again.skipped] == [True, True]
    assert len(told) == 4


def test_what_is_damaged_at_the_target_is_no_news_to_a_chunk_that_trains_there(committed: Committed) -> None:
    for step in (2, 4):
        committed.commit(step)
    committed.store.storage.write(f"{committed.store.prefix(4)}/manifest.json", b"{")
    restorer = committed.restorer(4)
    restored = restorer.fetch()
    assert restored
    assert (restored.step, restorer.skipped) == (2, [])
    scoring = committed.restorer(4)
    scored = scoring.fetch(to_score=True)
    assert scored
    assert (scored.step, scored.is_target, len(scoring.skipped)) == (2, False, 1)


def test_another_recipes_is_an_error_before_a_byte_is_read(committed: Committed) -> None:
    committed.commit(2)
    committed.commit(4, identity="other")
    with pytest.raises(ExactnessError, match=r"step 4 was made from another recipe"):
        committed.restorer(9).fetch()
    restored = committed.restorer(4).fetch()
    assert restored
    assert restored.step == 2


def test_code_is_passed_over_and_never_runs(committed: Committed, told: list[Any], tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    committed.commit(2)
    committed.commit(4, content=Mkdir(str(mark)))
    restorer = committed.restorer(9)
    restored = restorer.require_no_code(restorer.fetch())
    assert restored
    assert restored.step == 2
    assert not mark.exists()
    assert len(restorer.skipped) == 1
    assert "state.pt: a pickle that holds code (posix.mkdir)" in restorer.skipped[0]
    assert [event.step for event in told] == [4, 4], "found, and then known"
    assert restorer.require_no_code(None) is None


def test_where_all_hold_code_none_is_left(committed: Committed, tmp_path: Path) -> None:
    committed.commit(2, content=Mkdir(str(tmp_path / "it-ran")))
    restorer = committed.restorer(9)
    assert restorer.require_no_code(restorer.fetch()) is None


@pytest.mark.parametrize("find", [committed_at_target, usable_at_target])
def test_a_committed_target_is_found(find: Any, committed: Committed) -> None:
    assert find(committed.store, 4) is None
    committed.commit(2)
    assert find(committed.store, 4) is None
    committed.commit(4)
    assert find(committed.store, 4).step == 4
    committed.commit(6)
    assert find(committed.store, 4).step == 6
    committed.spoil(6, cut=True)
    assert find(committed.store, 4).step == 4
    assert find(committed.store, 5) is None


@pytest.mark.parametrize("find", [committed_at_target, usable_at_target])
def test_what_ended_the_run_is_as_good_as_the_target(find: Any, committed: Committed) -> None:
    committed.commit(2, finished=True)
    assert find(committed.store, 4).step == 2


def test_bytes_count_only_where_they_are_read(committed: Committed, told: list[Any]) -> None:
    committed.commit(4)
    committed.spoil(4)
    assert committed_at_target(committed.store, 4) is not None
    assert usable_at_target(committed.store, 4) is None
    assert [event.step for event in told] == [4]
    assert committed.store.newest() is None, "marked"
