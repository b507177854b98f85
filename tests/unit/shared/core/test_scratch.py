"""Folders that a killed process left go with the next one's; those of a living one stay."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.components.shared.core.scratch import clear_left, scratch_folder

_KILLED = """
import os, pathlib, signal, tempfile, sys
tempfile.tempdir = sys.argv[1]
from baton.components.shared.core.scratch import scratch_folder
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
