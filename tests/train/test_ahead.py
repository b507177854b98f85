"""Files that are read ahead of a stage."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.train import readahead

HALF = 2**22
PAGE = mmap.PAGESIZE


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A file on a disk, of which nothing is in the kernel's cache."""
    file = tmp_path / "library.so"
    with file.open("wb") as opened:
        opened.write(os.urandom(2 * HALF))
        opened.flush()
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _cached(file, 0) or _cached(file, HALF):
        pytest.skip("this file system keeps what it was told to drop")
    return file


def _cached(file: Path, offset: int) -> bool:
    """Tells whether a page is in the kernel's cache, and reads nothing."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        state, page = (ctypes.c_ubyte * 1)(), ctypes.c_char.from_buffer(mapped, offset)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(page)), ctypes.c_size_t(PAGE), state)
        del page  # else the map cannot be closed
    assert not failed
    return bool(state[0] & 1)


def _listed(tmp_path: Path, *parts: str) -> str:
    (tmp_path / "train_chunk").write_text("".join(f"{part}\n" for part in parts))
    return str(tmp_path)


def _awaited(process: int | None) -> None:
    assert process is not None
    assert os.waitpid(process, 0)[1] == 0


def _until_cached(file: Path, offset: int) -> bool:
    end = time.monotonic() + 20
    while not _cached(file, offset) and time.monotonic() < end:
        time.sleep(0.01)
    return _cached(file, offset)


def test_the_listed_part_of_a_file_is_read_and_no_other(on_disk: Path, tmp_path: Path) -> None:
    folder = _listed(tmp_path, f"0 {PAGE} {tmp_path}/gone", f"{HALF} {HALF} {on_disk}")
    _awaited(readahead.start("train_chunk", folder))
    assert _until_cached(on_disk, HALF)
    assert _until_cached(on_disk, 2 * HALF - PAGE)
    assert not _cached(on_disk, 0)


@pytest.mark.parametrize("room", ["train_chunk", "", "../reads"])
def test_without_a_list_nothing_happens(room: str, tmp_path: Path) -> None:
    assert readahead.start(room, str(tmp_path)) is None


def test_a_stage_begins_with_it_and_has_imported_nothing_else() -> None:
    """Each module that comes before it is read without it."""
    script = "import sys; before = set(sys.modules); from baton.train import readahead as ahead; " + (
        "print(*sorted(set(sys.modules) - before))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert set(told) == {"baton", "baton.train", readahead.__name__}
