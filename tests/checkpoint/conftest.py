"""What tests of several modules here share: a run to fill with checkpoints."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore
from baton.errors import DamagedError
from baton.runs.run import Run
from baton.store.bundle import BundleWriter
from baton.store.storage import Storage


class Checkpoints:
    """A run's checkpoints, and what happens to them."""

    def __init__(self, storage: Storage, folder: Path, run: str = "r") -> None:
        self.store = CheckpointStore(Run(storage, run))
        self.storage = storage
        self.folder = folder

    def send(self, step: int, losses: dict[int, float | None] | None = None) -> BundleWriter:
        """Upload a checkpoint, and stop short of its manifest."""
        local = self.folder / f"{self.store.run.name}-{step}-{time.monotonic_ns()}"
        local.mkdir()
        log = [{"step": at, "eval_loss": loss} for at, loss in (losses or {}).items()]
        (local / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        (local / "weights.bin").write_bytes(step.to_bytes(4) * 25)
        writer = self.store.open_writer(step)
        writer.send(str(local))
        return writer

    def commit(self, step: int, losses: dict[int, float | None] | None = None) -> Checkpoint:
        """Upload and commit a checkpoint."""
        meta = CheckpointMeta(digest=f"state of {step}")
        return self.store.commit(step, self.send(step, losses), meta)[0]

    def commit_all(self, *steps: int, losses: dict[int, float | None] | None = None) -> None:
        """Commit checkpoints, each with the evaluation losses up to its step."""
        for step in steps:
            self.commit(step, {at: loss for at, loss in (losses or {}).items() if at <= step})

    def truncate(self, step: int) -> None:
        """Take a byte from a file of what is committed."""
        path = self._weights(step)
        self.storage.write(path, self.storage.read(path)[:-1])

    def damage(self, step: int) -> None:
        """Flip a bit of what is committed, and have a reader find that."""
        path, checkpoint = self._weights(step), self.store.read(step)
        assert checkpoint is not None
        data = self.storage.read(path)
        self.storage.write(path, bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(DamagedError):
            self.store.fetch(checkpoint, str(self.folder / "read"))

    def _weights(self, step: int) -> str:
        checkpoint = self.store.read(step)
        assert checkpoint is not None
        return checkpoint.manifest.path(self.store.prefix(step), "weights.bin")

    @property
    def whole(self) -> list[int]:
        """The steps a reader can have, ascending: every byte is checked."""
        return sorted(found.step for found in self.store.committed() if self.store.verify(found) == [])

    def objects(self, step: int | None = None) -> list[str]:
        """The names of all there is, or of what is under a step."""
        below = self.store.run.path("checkpoints") if step is None else self.store.prefix(step)
        return list(self.storage.find(below))

    def newest(self) -> int:
        """The step a chunk would restore: the first, from the newest down, that comes over whole."""
        for checkpoint in self.store.committed():
            try:
                self.store.fetch(checkpoint, str(self.folder / f"restored-{time.monotonic_ns()}"))
            except DamagedError:
                continue
            return checkpoint.step
        raise AssertionError("no checkpoint can be restored")


@pytest.fixture
def checkpoints_at(tmp_path: Path) -> Callable[..., Checkpoints]:
    """Makes an empty run in a store."""
    (tmp_path / "local").mkdir()

    def make(store: str, run: str = "r") -> Checkpoints:
        return Checkpoints(Storage(store), tmp_path / "local", run)

    return make


@pytest.fixture
def checkpoints(store: str, checkpoints_at: Callable[..., Checkpoints]) -> Checkpoints:
    """An empty run in each kind of store."""
    return checkpoints_at(store)


@pytest.fixture
def in_a_folder(tmp_path: Path, checkpoints_at: Callable[..., Checkpoints]) -> Checkpoints:
    """An empty run in a folder, whose files can be set back in time."""
    return checkpoints_at(str(tmp_path / "store"))
