"""What a chunk restores from a cloud is memory of its own: the same bits, no copy, and no file of anybody else's."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from baton.checkpoint import staging as held
from baton.checkpoint.staging import Staging
from tests.support import tiny
from tests.train.resuming import Chunks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files that are memory alone")
LAST, BETWEEN = 8, 5
SETTINGS = {"optimizer": "adamw_torch", "max_steps": LAST, "learning_rate": 0.01}


def mappings(name: str = "") -> int:
    """Returns the bytes of memory files that this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if f"/memfd:{name}" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            total += end - begin
    return total


class Looking(TrainerCallback):
    """Notes what is mapped, and where the optimizer's state lies, once it has trained a step."""

    stateless = True
    mapped = 0
    folders = 0

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Looks."""
        type(self).mapped = mappings("optimizer.pt")
        type(self).folders = sum(path.is_symlink() for path in Path("/dev/shm").glob(f"*-{os.getpid()}-*/from-*/*"))


@pytest.fixture
def looking() -> type[Looking]:
    """Returns what looks, with nothing seen."""
    gc.collect()
    return type("Looking", (Looking,), {})


@pytest.fixture
def make(
    tiny_base: str, tmp_path: Path, looking: type[Looking], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Chunks]:
    """Returns what makes a run."""
    monkeypatch.setattr(held, "LEAST_HELD", 1)  # as large files are, which a test has none of

    def made(name: str, store: str | None, targets: tuple[int, ...] = (BETWEEN, LAST), **changes: Any) -> Chunks:
        given = tiny.recipe(tiny_base, training=SETTINGS, evaluation={"samples": 0}, **changes)
        return Chunks(given, tmp_path, name, targets, (looking,), store)

    return made


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["full", "lora"])
def test_the_same_bits_as_one_run(
    adapter: dict[str, Any] | None, make: Callable[..., Chunks], s3_store: str, looking: type[Looking]
) -> None:
    changes = {"adapter": adapter} if adapter else {}
    whole, chunks = make("whole", s3_store, (LAST,), **changes), make("held", s3_store, **changes)
    whole.train_all()
    assert looking.mapped == 0
    chunks.train_all()
    assert looking.mapped > chunks.at().manifest.files["optimizer.pt"]["size"] // 2, "the state is the file"
    assert looking.folders == 0, "what is not mapped is gone after the first step"
    assert chunks.at().meta.state == whole.at().meta.state
    assert chunks.logged() == whole.logged()


def test_without_the_optimizer_the_bits_differ(make: Callable[..., Chunks], s3_store: str) -> None:
    whole, chunks = make("whole", s3_store, (LAST,)), make("held", s3_store)
    whole.train_all()
    chunks.train(1)
    chunks.train(2, leave_out=("optimizer",))
    assert chunks.at().meta.state["optimizer"] != whole.at().meta.state["optimizer"]


def test_a_folders_own_files_are_not_mapped(make: Callable[..., Chunks], looking: type[Looking]) -> None:
    chunks = make("folder", None)
    chunks.train_all()
    assert looking.mapped == 0
    assert chunks.store.verify(chunks.at(BETWEEN)) == [], "training wrote nothing into them"


def test_what_is_mapped_stays_and_what_is_not_goes(
    make: Callable[..., Chunks], s3_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make("held", s3_store, (LAST,))
    chunks.train_all()
    checkpoint = chunks.at()
    with Staging() as staging:
        for _ in range(2):  # the second takes the place of the first
            folder = chunks.store.fetch(checkpoint, staging.incoming(checkpoint, alone=True))
        path = os.path.join(folder, "optimizer.pt")
        assert held.is_held(path)
        assert len(staging._held) == len(checkpoint.manifest.files)
        with held.mmap_load(path):
            state = torch.load(path, weights_only=True)["state"][0]["exp_avg"]
        read = torch.load(path, weights_only=True)["state"][0]["exp_avg"]
        assert torch.equal(state, read)
        staging.drop(folder)
        assert staging._held == []
        state += 1
        assert torch.equal(state, read + 1)
        monkeypatch.setattr(held, "LEAST_HELD", 2**40)
        plain = chunks.store.fetch(checkpoint, staging.incoming(checkpoint, alone=True))
        assert not any(path.is_symlink() for path in Path(plain).iterdir())


def test_a_name_is_as_long_as_a_file_system_takes(tmp_path: Path) -> None:
    name = "é" * 127
    (descriptor,) = held.memfd_files(str(tmp_path), {name: held.LEAST_HELD})
    assert held.is_held(str(tmp_path / name))
    os.close(descriptor)


def test_where_memory_has_no_room_it_goes_to_disk(
    make: Callable[..., Chunks], s3_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton import machine

    chunks = make("held", s3_store, (LAST,))
    chunks.train_all()
    monkeypatch.setattr(machine, "available_memory", lambda: chunks.at().bytes)
    with Staging() as staging:
        folder = chunks.store.fetch(chunks.at(), staging.incoming(chunks.at(), alone=True))
        assert not held.is_held(os.path.join(folder, "optimizer.pt"))
