"""Checkpoints on their way: one at a time, every other makes way, a store that takes nothing ends the chunk in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton import events
from baton.checkpoint.staging import PendingCheckpoint
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore
from baton.errors import BatonError, ExactnessError, UnavailableError
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train import checkpointer as committing
from baton.train.checkpointer import Uploader


class Gated(Storage):
    """A store whose uploads wait for a gate, and that does not answer while it is away."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.gate = threading.Event()
        self.gate.set()
        self.away = False
        self.entered = threading.Event()
        self.refusals = 0

    def upload(self, local_path: str, path: str, check: Callable[[], None] = lambda: None) -> str:
        """Waits, looking now and then whether it is still wanted."""
        self.entered.set()
        while not self.gate.wait(0.01):
            check()
        if self.away:
            self.refusals += 1
            raise UnavailableError("the store does not answer.")
        return super().upload(local_path, path, check)


class Commits:
    """An uploader, what it was given and what it has told."""

    def __init__(self, folder: Path, max_unsaved: float = 60.0) -> None:
        self.storage = Gated(str(folder / "store"))
        self.store = CheckpointStore(Run(self.storage, "r"))
        self.told: list[tuple[int, bool, dict[str, float]]] = []
        self.failing: Exception | None = None
        self.uploader = Uploader(self.store, self._committed, max_unsaved=max_unsaved)
        self.folder = folder

    def _committed(
        self, pending: PendingCheckpoint, checkpoint: Checkpoint, ours: bool, seconds: dict[str, float]
    ) -> None:
        self.told.append((checkpoint.step, ours, seconds))
        assert Path(pending.folder).exists(), "the folder goes after this"
        if self.failing:
            raise self.failing

    def staged(self, step: int, *, must_keep: bool = False, writer: Any = None) -> PendingCheckpoint:
        """Stages a checkpoint."""
        local = self.folder / f"staged-{step}"
        local.mkdir()
        (local / "weights").write_bytes(b"w" * step)
        return PendingCheckpoint(step, str(local), writer, {"state": f"state of {step}"}, must_keep)

    def submit(self, pending: PendingCheckpoint) -> None:
        """Sends it on its way."""
        self.uploader.submit(pending, lambda: CheckpointMeta(digest=pending.digests["state"]))

    @property
    def steps(self) -> list[int]:
        """What is committed."""
        return sorted(checkpoint.step for checkpoint in self.store.committed())


@pytest.fixture
def commits(tmp_path: Path) -> Commits:
    return Commits(tmp_path)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[events.Event]:
    """The events that are emitted."""
    found: list[events.Event] = []
    monkeypatch.setattr(events, "emit", found.append)
    return found


def test_what_is_staged_is_committed_beside_training_and_its_folder_goes(
    commits: Commits, told: list[events.Event]
) -> None:
    commits.storage.gate.clear()
    staged = commits.staged(3)
    assert commits.uploader.is_idle
    commits.submit(staged)
    assert not commits.uploader.is_idle
    assert commits.steps == []
    commits.storage.gate.set()
    commits.uploader.finish()
    assert commits.uploader.is_idle
    assert commits.steps == [3]
    ((step, ours, seconds),) = commits.told
    assert (step, ours) == (3, True)
    assert set(seconds) == {"upload", "commit"}
    assert all(0 <= value < 30 for value in seconds.values())
    assert not Path(staged.folder).exists()
    phases = [(event.phase, event.step) for event in told if isinstance(event, events.Phase)]
    assert phases == [("upload", 3), ("commit", 3)]


def test_what_another_has_committed_is_not_ours(commits: Commits) -> None:
    commits.submit(commits.staged(3))
    commits.uploader.finish()
    commits.submit(commits.staged(3))
    commits.uploader.finish()
    assert [ours for _, ours, _ in commits.told] == [True, False]


def test_a_newer_one_takes_the_place_of_one_on_its_way(commits: Commits, told: list[events.Event]) -> None:
    commits.storage.gate.clear()
    first = commits.staged(3)
    commits.submit(first)
    commits.storage.entered.wait(10)
    commits.uploader.make_way()
    assert commits.uploader.is_idle
    assert not Path(first.folder).exists()
    commits.storage.gate.set()
    commits.submit(commits.staged(4))
    commits.uploader.finish()
    assert commits.steps == [4]
    assert [event.step for event in told if isinstance(event, events.Superseded)] == [3]


def test_one_that_must_be_kept_is_waited_for(commits: Commits) -> None:
    commits.storage.gate.clear()
    commits.submit(commits.staged(3, must_keep=True))
    threading.Timer(0.3, commits.storage.gate.set).start()
    commits.uploader.make_way()
    assert commits.steps == [3]
    commits.submit(commits.staged(4))
    commits.uploader.finish()
    assert commits.steps == [3, 4]


def test_making_way_for_nothing_waits_for_nothing(commits: Commits) -> None:
    commits.uploader.make_way()
    commits.uploader.finish()
    commits.uploader.abandon(5.0)
    commits.submit(commits.staged(3))
    commits.uploader.finish()
    commits.uploader.make_way()
    assert commits.steps == [3]


def test_a_failure_is_raised_where_it_is_asked_for(commits: Commits) -> None:
    commits.failing = ValueError("retention")
    commits.uploader.raise_failure()
    commits.submit(commits.staged(3))
    with pytest.raises(ValueError, match="retention"):
        commits.uploader.finish()
    with pytest.raises(ValueError, match="retention"):
        commits.uploader.raise_failure()
    assert commits.steps == [3]


def test_where_each_upload_is_slower_than_training_every_other_one_arrives(commits: Commits) -> None:
    for step in range(1, 6):
        commits.storage.gate.clear()
        commits.submit(commits.staged(step))
        if step % 2 == 0:
            threading.Timer(0.3, commits.storage.gate.set).start()
        commits.uploader.make_way()
        commits.uploader.raise_failure()
    assert commits.steps == [2, 4]


def test_while_the_store_is_away_it_is_tried_again_and_training_may_take_another(
    commits: Commits, told: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "PAUSE", 0.05)
    commits.storage.away = True
    first = commits.staged(3)
    commits.submit(first)
    until = time.monotonic() + 20
    while not commits.uploader.is_idle and time.monotonic() < until:
        time.sleep(0.01)
    assert commits.uploader.is_idle, "one that does not get through keeps none back"
    unavailable = [event for event in told if isinstance(event, events.StoreUnavailable)]
    assert unavailable[0].step == 3
    assert 0 <= unavailable[0].unsaved < 20
    assert unavailable[0].reason == "the store does not answer."
    commits.uploader.make_way()  # returns while the store is away
    assert commits.storage.away
    assert first.superseded.is_set()
    assert not Path(first.folder).exists()
    commits.storage.away = False
    commits.submit(commits.staged(4))
    commits.uploader.finish()
    commits.uploader.raise_failure()
    assert commits.steps == [4]


def test_what_was_sent_is_not_sent_again(commits: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "PAUSE", 0.01)
    writer = commits.store.open_writer(3)
    first = commits.folder / "first"
    first.mkdir()
    (first / "optimizer").write_bytes(b"o")
    writer.send(str(first))
    commits.storage.away = True
    commits.submit(commits.staged(3, writer=writer))
    while commits.storage.refusals < 3:
        time.sleep(0.01)
    commits.storage.away = False
    commits.uploader.finish()
    checkpoint = commits.store.read(3)
    assert checkpoint
    assert set(checkpoint.manifest.files) == {"optimizer", "weights"}
    assert checkpoint.manifest.folder == writer.folder


def test_patience_counts_from_the_last_commit_and_ends_the_chunk(
    tmp_path: Path, told: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "PAUSE", 0.02)
    commits = Commits(tmp_path, max_unsaved=1.0)
    commits.storage.away = True
    commits.submit(commits.staged(3))
    time.sleep(0.6)
    commits.uploader.make_way()
    commits.submit(commits.staged(4))
    with pytest.raises(UnavailableError, match=r"could be saved for 1 s, chunks\.max_unsaved is 1 s; the chunk stops"):
        commits.uploader.finish()
    assert commits.steps == []
    unavailable = [event for event in told if isinstance(event, events.StoreUnavailable)]
    assert min(event.unsaved for event in unavailable if event.step == 4) >= 0.6, "the two share one bound"


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        pytest.param(ExactnessError("another process committed other bits."), True, id="other bits"),
        pytest.param(BatonError("the request has failed."), False, id="a request that failed"),
        pytest.param(UnavailableError("the store has gone."), False, id="a store that has gone"),
        pytest.param(FileNotFoundError("its folder has gone"), False, id="a folder that has gone"),
        pytest.param(MemoryError("no memory"), False, id="no memory"),
    ],
)
def test_a_failure_of_one_that_made_way_is_raised_where_it_is_the_runs_and_logged_else(
    error: Exception, is_raised: bool, commits: Commits, caplog: pytest.LogCaptureFixture
) -> None:
    commits.storage.gate.clear()
    commits.failing = error  # as the commit is noted, which looks at what another process has committed
    staged = commits.staged(3)
    commits.submit(staged)
    commits.storage.entered.wait(10)
    noted = commits.uploader._committed

    def made_way_meanwhile(*arguments: Any) -> None:
        staged.superseded.set()
        noted(*arguments)

    commits.uploader._committed = made_way_meanwhile
    commits.storage.gate.set()
    if is_raised:
        with pytest.raises(type(error), match=str(error)):
            commits.uploader.finish()
    else:
        commits.uploader.finish()
        assert f"step 3, which made way, failed: {error}" in caplog.text
        # The same of the newest one ends the chunk.
        commits.submit(commits.staged(4))
        with pytest.raises(type(error), match=str(error)):
            commits.uploader.finish()


def test_one_that_is_abandoned_has_a_moment(commits: Commits) -> None:
    commits.storage.gate.clear()
    commits.submit(commits.staged(3))
    commits.uploader.abandon(0.2)  # returns while the upload hangs
    assert commits.steps == []
    commits.storage.gate.set()
    commits.uploader.abandon(20.0)
    assert commits.steps == [3]
