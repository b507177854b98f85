"""Folders of a process for what it needs while it runs, under names by which others tell what a killed one left."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import psutil

_OURS = f"baton-{socket.gethostname()}-"
"""How names begin: pods that share a folder have different host names, and may have the same process ids."""


def prefix() -> str:
    """Returns how the names of this process's folders begin."""
    return f"{_OURS}{os.getpid()}-"


@contextlib.contextmanager
def scratch_folder(name: str) -> Iterator[str]:
    """Makes a temporary folder for the time of a block, and removes those that killed processes left.

    Args:
        name: What it is for.
    """
    clear_left(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=f"{prefix()}{name}-") as folder:
        yield folder


def clear_left(place: str) -> None:
    """Removes the folders that processes of this machine left in a place when they were killed."""
    for folder in glob.glob(os.path.join(place, f"{_OURS}*")):
        pid = os.path.basename(folder).removeprefix(_OURS).partition("-")[0]
        # A number that was given to another process keeps a dead one's folder: a waste, and no harm.
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
