"""Folders that a killed process left go with the next one's; those of a living one stay."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.scratch import clear_left, make, remove, scratch_folder

_KILLED = """
import os, pathlib, signal, tempfile, sys
tempfile.tempdir = sys.argv[1]
from baton.scratch import scratch_folder
with scratch_folder("evaluate") as folder:
    pathlib.Path(folder, "weights").write_text("large")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "weights").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("export") as folder:
        assert os.listdir(tmp_path) == [os.path.basename(folder)]
    assert os.listdir(tmp_path) == []


def test_what_is_in_use_or_is_another_machines_stays(tmp_path: Path) -> None:
    host = socket.gethostname()
    names = {f"baton-{host}-{os.getpid()}-x", f"baton-{host}x-999999999-x", "baton-kfp-1", f"baton-{host}-no-number"}
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f"baton-{host}-999999999-x").mkdir()
    clear_left(str(tmp_path))
    assert set(os.listdir(tmp_path)) == names


@contextlib.contextmanager
def holding(place: Path, pid: int | None = None) -> Iterator[Path]:
    """A living process that holds a folder in a place, as another container with the same host name shows it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LIVES, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdin
    folder = Path(process.stdout.readline().strip())
    if pid is not None:  # the number that it has in its own container
        folder = folder.rename(folder.with_name(folder.name.replace(f"-{process.pid}-", f"-{pid}-")))
    try:
        yield folder
    finally:
        process.kill()
        process.wait()


_LIVES = """
import sys
from baton import scratch
print(scratch.make(sys.argv[1], "evaluate"), flush=True)
sys.stdin.read()
"""
NOBODY = 999_999_999
"""A number that no process here has."""


@pytest.mark.parametrize("pid", [None, NOBODY], ids=["of this container", "of another container"])
@pytest.mark.parametrize("asked", [None, NOBODY], ids=["of all", "of a number that died here"])
def test_a_folder_stays_as_long_as_its_process_lives(pid: int | None, asked: int | None, tmp_path: Path) -> None:
    with holding(tmp_path, pid) as folder:
        clear_left(str(tmp_path), asked)
        assert folder.exists()
    clear_left(str(tmp_path), None if pid is None else asked)
    assert not folder.exists()


def test_a_folder_that_is_removed_is_let_go(tmp_path: Path) -> None:
    folder = make(str(tmp_path), "evaluate")
    (Path(folder) / "weights").write_text("large")
    held = len(os.listdir("/proc/self/fd"))
    remove(folder)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == held - 1


def test_folders_are_made_while_others_clear(tmp_path: Path) -> None:
    """None is taken between its making and its lock, under a number that nobody has."""
    done = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: NOBODY)

        def clear() -> None:
            while not done.is_set():
                clear_left(str(tmp_path))

        clearing = threading.Thread(target=clear)
        clearing.start()
        try:
            folders = [make(str(tmp_path), "evaluate") for _ in range(300)]
        finally:
            done.set()
            clearing.join()
    assert sorted(map(os.path.basename, folders)) == sorted(os.listdir(tmp_path))
    for folder in folders:
        remove(folder)
