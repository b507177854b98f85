"""Checkpoints where there is little room: another place, or the store file by file; other failures end the chunk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from transformers import modeling_utils

from baton.checkpoint import staging
from baton.checkpoint.staging import PendingCheckpoint
from baton.errors import BatonError
from baton.train.distributed import Ranks
from baton.train.trainer import NO_ROOM, _is_full, seed_of
from tests.support import tiny
from tests.train.resuming import Chunks

SETTINGS = {"optimizer": "adamw_torch", "max_steps": 2, "learning_rate": 0.01}


@pytest.fixture
def make(tiny_base: str, tmp_path: Path) -> Callable[..., Chunks]:
    def made(name: str, targets: tuple[int, ...] = ()) -> Chunks:
        given = tiny.recipe(tiny_base, training=SETTINGS, evaluation={"samples": 0}, chunks={"keep": {"last": 9}})
        return Chunks(given, tmp_path, name, targets)

    return made


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """What stands for memory and disk."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for place in (memory, disk):
        place.mkdir()
    monkeypatch.setattr(staging, "MEMORY", str(memory))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    return memory, disk


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, below: Path) -> list[str]:
    """Has a writer fail, after a byte, for files below a folder; returns those that it was asked for."""
    write, asked = getattr(owner, name), []

    def write_or_fail(value: Any, path: Any, *rest: Any, **options: Any) -> Any:
        if not str(path).startswith(str(below)):
            return write(value, path, *rest, **options)
        asked.append(os.path.basename(str(path)))
        Path(path).write_bytes(b"\0")
        raise error

    monkeypatch.setattr(owner, name, write_or_fail)
    return asked


FULL = OSError(errno.ENOSPC, "No space left on device")
WRITERS = {"optimizer": (torch, "save"), "weights": (modeling_utils, "safe_save_file")}


@pytest.mark.parametrize("writer", WRITERS)
def test_where_it_runs_out_of_room_the_next_place_is_tried(
    writer: str, make: Callable[..., Chunks], places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make("whole")
    whole.train_all()
    asked = failing(monkeypatch, *WRITERS[writer], FULL, places[0])
    chunks = make("moved")
    chunks.train_all()
    assert len([name for name in asked if name != "training_args.bin"]) == 1
    assert chunks.at().meta.state == whole.at().meta.state
    assert chunks.at().manifest.files.keys() == whole.at().manifest.files.keys()
    assert all(list(place.iterdir()) == [] for place in places)


@pytest.mark.parametrize("writer", WRITERS)
def test_another_failure_ends_the_chunk_and_leaves_nothing(
    writer: str, make: Callable[..., Chunks], places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = failing(monkeypatch, *WRITERS[writer], OSError(errno.EIO, "Input/output error"), places[0])
    chunks = make("broken")
    with pytest.raises(OSError, match="Input/output error"):
        chunks.train_all()
    assert len([name for name in asked if name != "training_args.bin"]) == 1
    assert chunks.steps == []
    assert not list(places[0].rglob("checkpoint-*"))


def test_without_room_anywhere_it_is_sent_file_by_file(
    make: Callable[..., Chunks], places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make("whole", (1, 2))
    whole.train_all()
    usage = shutil.disk_usage
    small = {str(place) for place in places}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1) if path in small else usage(path))
    chunks = make("sent", (1, 2))
    held: list[list[str]] = []
    upload = chunks.run.storage.upload

    def watched(local: str, *rest: Any, **options: Any) -> str:
        held.append(sorted(os.listdir(os.path.dirname(local))))
        return upload(local, *rest, **options)

    monkeypatch.setattr(chunks.run.storage, "upload", watched)
    chunks.train_all()
    assert chunks.at().meta.state == whole.at().meta.state
    assert chunks.at().manifest.files.keys() == whole.at().manifest.files.keys()
    assert (chunks.at().meta.restored.step, chunks.at().meta.restored.skipped) == (1, [])
    assert not any({"model.safetensors", "optimizer.pt"} <= set(names) for names in held), "never both at a time"
    assert all(list(place.iterdir()) == [] for place in places)


def test_where_the_last_place_is_full_the_chunk_fails(
    make: Callable[..., Chunks], places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    for place in places:
        failing(monkeypatch, torch, "save", FULL, place)
    chunks = make("full")
    with pytest.raises(OSError, match="No space left"):
        chunks.train_all()
    assert chunks.steps == []


def test_full_is_told_from_broken_in_python_and_in_libraries() -> None:
    assert _is_full(FULL)
    assert _is_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    for sign in NO_ROOM:
        assert _is_full(RuntimeError(f"[enforce fail] {sign}, 12 vs 3"))
    assert not _is_full(OSError(errno.EIO, "Input/output error"))
    assert not _is_full(ValueError("shape"))


class Other(Ranks):
    """A process among two, of which the other has told something."""

    theirs: Any = None

    def gather(self, value: Any) -> list[Any]:
        """Returns what both have told."""
        return [value, type(self).theirs]


@pytest.mark.parametrize(
    ("ours", "theirs", "last", "expected"),
    [
        (None, None, False, False),
        (None, ("No space left", True), False, True),
        (FULL, None, False, True),
        (FULL, ("No space left", True), False, True),
        (None, ("Input/output error", False), False, "rank 1 could not write its part of the checkpoint: Input/output"),
        (FULL, ("Input/output error", False), False, "rank 1 could not write its part"),
        (FULL, None, True, "No space left"),
        (OSError(errno.EIO, "mine"), ("No space left", True), False, "mine"),
    ],
)
def test_ranks_try_another_place_together(
    ours: Exception | None, theirs: Any, last: bool, expected: bool | str, tiny_base: str, tmp_path: Path
) -> None:
    given = tiny.recipe(tiny_base, training={**SETTINGS, "method": "dpo"})
    trainer = tiny.trainer(given, tiny.tokens(given, tiny.PAIRS), tmp_path)
    trainer.ranks = type("Told", (Other,), {"theirs": theirs})(size=2)
    folder = Path(trainer.checkpoint_folder())
    folder.mkdir(parents=True)
    if isinstance(expected, str):
        with pytest.raises((OSError, BatonError), match=expected):
            trainer._all_ran_out_of_room(ours, last=last)
        assert folder.exists() == (expected.startswith("rank 1"))
    else:
        assert trainer._all_ran_out_of_room(ours, last=last) is expected
        assert folder.exists()


def test_a_failure_that_is_no_exception_of_pythons_counts(tiny_base: str, tmp_path: Path) -> None:
    """Torch's writers raise one beside `Exception`."""
    given = tiny.recipe(tiny_base, training={**SETTINGS, "method": "dpo"})
    trainer = tiny.trainer(given, tiny.tokens(given, tiny.PAIRS), tmp_path)
    written: list[str] = []

    def write(*_: Any) -> None:
        written.append(trainer.args.output_dir)
        os.makedirs(trainer.checkpoint_folder())
        if len(written) == 1:
            full = RuntimeError("PytorchStreamWriter failed writing file data/3")
            raise CheckpointException("", {0: (full, StackSummary())})

    trainer.write_checkpoint = write
    trainer.places = lambda: iter(
        [PendingCheckpoint(1, str(tmp_path / place / "checkpoint-1")) for place in ("a", "b", "c")]
    )
    trainer._save_checkpoint(None, None)
    assert written == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert not (tmp_path / "a" / "checkpoint-0").exists()
    assert (tmp_path / "b" / "checkpoint-0").exists()


def _fails(error: BaseException, *, made: bool) -> Callable[[Any], Callable[..., None]]:
    def of(trainer: Any) -> Callable[..., None]:
        def write(*_: Any) -> None:
            if made:
                os.makedirs(trainer.checkpoint_folder())
            raise error

        return write

    return of


def _in_parts(text: str) -> CheckpointException:
    return CheckpointException("", {0: (RuntimeError(text), StackSummary())})


FAILURES: dict[str, tuple[BaseException, int, type[BaseException], str]] = {
    "full": (FULL, 3, OSError, "No space left on device"),
    "full, in parts": (_in_parts("PytorchStreamWriter failed writing"), 3, OSError, "PytorchStreamWriter failed"),
    "broken, in parts": (_in_parts("Input/output error"), 1, OSError, "Input/output error"),
    "told to end": (KeyboardInterrupt("told"), 1, KeyboardInterrupt, "told"),
}
"""What a writer raises in each of three places, the last of them file by file → places tried, and how it ends."""


@pytest.mark.parametrize("made", [True, False], ids=["half-written", "not begun"])
@pytest.mark.parametrize("case", FAILURES)
def test_a_writer_that_fails_ends_in_an_error_of_pythons(case: str, made: bool, tiny_base: str, tmp_path: Path) -> None:
    error, places, kind, message = FAILURES[case]
    given = tiny.recipe(tiny_base, training={**SETTINGS, "method": "dpo"})
    trainer = tiny.trainer(given, tiny.tokens(given, tiny.PAIRS), tmp_path)
    tried: list[str] = []

    def offered() -> Iterator[PendingCheckpoint]:
        for name in ("a", "b", "c"):
            tried.append(name)
            yield PendingCheckpoint(1, str(tmp_path / name / "checkpoint-0"), writer=object() if name == "c" else None)

    trainer.places = offered
    trainer.write_checkpoint = _fails(error, made=made)(trainer)
    with pytest.raises(kind, match=message):
        trainer._save_checkpoint(None, None)
    assert len(tried) == places
    if kind is OSError:
        assert not list(tmp_path.rglob("checkpoint-0"))


def test_seeds_of_ranks_differ_and_stay_what_they_are() -> None:
    assert seed_of(7, 0) == 7
    seeds = {seed_of(7, rank, step) for rank in range(8) for step in range(8)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert [seed_of(7, 1), seed_of(7, 0, 1), seed_of(2**32 - 1, 3, 5)] == [
        7 + 0x9E3779B1,
        7 + 0x85EBCA77,
        (2**32 - 1 + 3 * 0x9E3779B1 + 5 * 0x85EBCA77) % 2**32,
    ], "runs resume with a newer release"
