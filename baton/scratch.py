"""A process's temporary folders, locked, so that other processes recognise those that a killed one left."""

import contextlib
import fcntl
import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import psutil

_OURS = f"baton-{socket.gethostname()}-"  # beginning of names: machines that share a folder have different host names
_locks: dict[str, int | None] = {}  # folder → descriptor that holds its lock while this process or a fork of it lives


@contextlib.contextmanager
def scratch_folder(name: str) -> Iterator[str]:
    """Makes a folder for a block, and removes those that killed processes left."""
    clear_left(tempfile.gettempdir())
    folder = make(tempfile.gettempdir(), name)
    try:
        yield folder
    finally:
        remove(folder)


def make(place: str, name: str = "staging") -> str:
    """Makes a folder that stays until `remove`, or this process's end."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{_OURS}{os.getpid()}-{name}-", dir=place)
        lock, is_free = _lock(folder)
        if is_free and os.path.isdir(folder):
            _locks[folder] = lock
            return folder
        if lock is not None:  # before the lock, another process took the folder for one that was left
            os.close(lock)


def remove(folder: str) -> None:
    """Removes a folder of this process."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def clear_left(place: str, pid: int | None = None) -> None:
    """Removes the folders that killed processes of this machine left in a place."""
    # Containers that share the place may share the host name too, and do not see each other's processes: a locked
    # folder is in use. Without a lock, as older releases made them, a process of that number keeps it.
    for folder in glob.glob(os.path.join(glob.escape(place), f"{_OURS}{'' if pid is None else f'{pid}-'}*")):
        number = os.path.basename(folder).removeprefix(_OURS).partition("-")[0]
        if not number.isdigit() or (pid is None and psutil.pid_exists(int(number))):
            continue
        lock, is_free = _lock(folder)
        if is_free:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: str) -> tuple[int | None, bool]:
    """Locks a folder; returns the lock's descriptor, None where there is none, and whether the folder was free."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it has gone, or is another user's
        return None, False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None, False
    except OSError:  # the file system has no locks: numbers alone tell
        pass
    return descriptor, True
