"""A finished run of which something is damaged: one `baton run` makes it anew, and ends on the same bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from baton.store.storage import Storage

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[1] / "recipes/scratch.yaml"
BATON = str(Path(sys.executable).parent / "baton")
LAST = 4


class Finished:
    """A finished run in a store that is a folder.

    Attributes:
        run: The run.
        first: What `baton run` printed when it was made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Run(Storage(str(folder / "store")), "whole")
        self.first, _ = self.start()

    def start(self) -> tuple[dict[str, Any], str]:
        """Runs it, again where it was, and returns its JSON and what it showed."""
        command = [BATON, "run", str(RECIPE), "--run", "whole", "--store", str(self.folder / "store")]
        settings = ["training.epochs=null", f"training.max_steps={LAST}", "chunks.count=2", "tracking.mlflow=null"]
        command += [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run([*command, "--output", "json"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), " ".join(done.stderr.split())

    def checkpoint(self) -> Path:
        """Returns the folder of the last checkpoint's files."""
        store = CheckpointStore(self.run)
        checkpoint = store.read(LAST)
        assert checkpoint is not None
        return Path(store.uri(checkpoint))

    def attempts(self) -> list[tuple[int, str, int]]:
        """Returns what each chunk did: its number, its outcome, and from which step."""
        return [(attempt.chunk, attempt.outcome, attempt.from_step) for attempt in self.run.attempts()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("damaged"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit in weights": lambda folder: flip(folder / "model.safetensors"),
    "flipped bit in optimizer": lambda folder: flip(folder / "optimizer.pt"),
    "truncated file": lambda folder: truncate(folder / "optimizer.pt"),
    "missing file": lambda folder: (folder / "optimizer.pt").unlink(),
    "missing files": lambda folder: shutil.rmtree(folder),
    "missing checkpoint": lambda folder: shutil.rmtree(folder.parent),
}
BYTES = ("flipped bit in weights", "flipped bit in optimizer")
"""Damage that a listing does not show."""


def harmed(finished: Finished, kind: str) -> tuple[dict[str, Any], str, list[tuple[int, str, int]]]:
    """Damages the last checkpoint, starts the run again, and returns what it came to and did."""
    before = len(finished.attempts())
    folder = finished.checkpoint()
    DAMAGE[kind](folder)
    found, shown = finished.start()
    assert folder != finished.checkpoint(), "it was made anew"
    assert (found["state"], found["checkpoints"][-1]["digest"]) == (
        "succeeded",
        finished.first["checkpoints"][-1]["digest"],
    )
    assert not CheckpointStore(finished.run).verify(CheckpointStore(finished.run).read(LAST))
    attempts = sorted(finished.attempts())
    assert len(attempts) > before
    return found, shown, attempts


@pytest.mark.parametrize("kind", DAMAGE)
def test_one_start_repairs_a_damaged_checkpoint(kind: str, finished: Finished) -> None:
    _, shown, attempts = harmed(finished, kind)
    assert (2, "done", LAST // 2) in attempts, "from the checkpoint before it"
    # The chunk that finds its target committed trusts the bytes that were read back before; the next stage reads them.
    assert ("the run repairs it once" in shown) == (kind in BYTES), shown


def test_bytes_that_nobody_has_read_back_are_read_by_the_chunk(finished: Finished) -> None:
    shutil.rmtree(finished.run.storage.key(finished.run.path("proof")))
    _, shown, _ = harmed(finished, BYTES[0])
    assert "The checkpoint of step 4 is not used" in shown
    assert "the run repairs it once" not in shown


def test_a_whole_run_is_left_as_it_is(finished: Finished) -> None:
    folder = finished.checkpoint()
    found, shown = finished.start()
    assert folder == finished.checkpoint()
    assert "not used" not in shown
    assert "the run repairs it once" not in shown
    assert found["checkpoints"] == finished.start()[0]["checkpoints"]
