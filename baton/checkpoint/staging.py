"""Staging of checkpoints and downloads in memory or on disk.

A download in memory is an unnamed file behind a descriptor of this process, so no folder needs room. Tensors map it
without a copy, and the mapping outlives the descriptor.
"""

import contextlib
import logging
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import psutil

from baton import events, machine, scratch
from baton.checkpoint.store import Checkpoint
from baton.errors import BatonError
from baton.store.bundle import BundleWriter

logger = logging.getLogger("baton")

MEMORY = "/dev/shm"
MARGIN = 1.1  # required room, as a multiple of the expected bytes
LEFT_FREE = 512 * 1024**2  # bytes of memory that staging keeps free
LEAST_HELD = 2**20  # smallest file in bytes to be held in memory
NAME_LENGTH = 60  # characters of a file's name in `memfd_create`, which takes 249 bytes


class SupersededError(BatonError):
    """A newer checkpoint takes this one's place."""


@dataclass
class PendingCheckpoint:
    """A checkpoint staged on this machine, on its way to the store."""

    step: int
    folder: str
    # The attempt that has some files already, as the folder has no room for all or several machines write.
    writer: BundleWriter | None = None
    digests: dict[str, str] = field(default_factory=dict)  # of the state in memory, joined over all ranks
    must_keep: bool = False  # no newer checkpoint may take its place
    superseded: threading.Event = field(default_factory=threading.Event)  # set once a newer one takes its place

    def check(self) -> None:
        """Raises `SupersededError` once a newer checkpoint has taken its place."""
        if self.superseded.is_set():
            raise SupersededError(f"a newer checkpoint takes the place of step {self.step}'s.")

    def send(self, folder: str) -> None:
        """Sends a folder's files and removes them, to make room for the next."""
        assert self.writer
        self.writer.send(folder)
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))


def memfd_files(folder: str, files: Mapping[str, int]) -> list[int]:
    """Links a download's large files (relative name → bytes) to empty files in memory, and returns the descriptors."""
    descriptors = []
    for name, size in files.items():
        if size >= LEAST_HELD:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptors.append(os.memfd_create(os.path.basename(name)[:NAME_LENGTH]))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # from an earlier try
            os.symlink(f"/proc/{os.getpid()}/fd/{descriptors[-1]}", path)
    return descriptors


def is_held(path: str) -> bool:
    """Tells whether a file is held in memory by this process."""
    return os.path.islink(path) and os.readlink(path).startswith(f"/proc/{os.getpid()}/fd/")


@contextlib.contextmanager
def mmap_load(path: str) -> Iterator[None]:
    """Makes `torch.load` map a held file; writes to its tensors change the file, so nothing else may read it."""
    if not is_held(path):
        yield
        return
    from torch.utils.serialization import config

    before = config.load.mmap, config.load.mmap_flags
    config.load.mmap, config.load.mmap_flags = True, mmap.MAP_SHARED
    try:
        yield
    finally:
        config.load.mmap, config.load.mmap_flags = before


class Staging:
    """Context manager with folders for a chunk's checkpoints and downloads."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._held: list[int] = []
        self._lock = threading.Lock()
        self._last: str | None = MEMORY
        clear_left()

    def folder(self, num_bytes: int) -> str:
        """Returns a folder for downloads: in memory if they fit, else on disk."""
        return self._folder(MEMORY if _has_room(MEMORY, num_bytes) else tempfile.gettempdir())

    def incoming(self, checkpoint: Checkpoint, *, alone: bool) -> str:
        """Returns a folder for a checkpoint's download, which replaces the previous one."""
        self._release()
        # Held files may be mapped and written to, see `mmap_load`: only if this process alone reads them.
        name, wanted = f"from-{checkpoint.step}", int(checkpoint.bytes * MARGIN) + LEFT_FREE
        if not alone or not hasattr(os, "memfd_create") or machine.available_memory() < wanted:
            return os.path.join(self.folder(checkpoint.bytes), name)
        folder = os.path.join(self.folder(0), name)
        sizes = {file: entry["size"] for file, entry in checkpoint.manifest.files.items()}
        self._held = memfd_files(folder, sizes)
        return folder

    def places(self, num_bytes: int) -> Iterator[tuple[str, bool]]:
        """Yields folders for a checkpoint, best first, and whether all of it fits, else it is sent in parts."""
        fitting = [place for place in (MEMORY, tempfile.gettempdir()) if _has_room(place, num_bytes)]
        for place in fitting:
            self._say(place, num_bytes)
            yield self._folder(place), True
        self._say(None, num_bytes)
        usable = [place for place in (MEMORY, tempfile.gettempdir()) if os.access(place, os.W_OK)]
        # Weights are sent and removed before the optimizer's state is written: only the larger of the two needs room.
        yield self._folder(max(usable, key=lambda place: shutil.disk_usage(place).free)), False

    def drop(self, path: str) -> None:
        """Removes a download that is no longer needed, if it is in one of these folders."""
        if any(os.path.dirname(path) == folder for folder in self._folders.values()):
            shutil.rmtree(path, ignore_errors=True)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._folders.values():
            scratch.remove(folder)
        self._release()

    def _release(self) -> None:
        """Closes held files; only mapped ones keep their memory."""
        while self._held:
            os.close(self._held.pop())

    def _folder(self, place: str) -> str:
        with self._lock:  # downloads run in several threads
            if place not in self._folders:
                self._folders[place] = scratch.make(place)
            return self._folders[place]

    def _say(self, place: str | None, num_bytes: int) -> None:
        """Reports each change of the place where checkpoints are staged."""
        if place == self._last:
            return
        self._last = place
        size = f"a checkpoint of {num_bytes / 1e6:.0f} MB"
        if place is None:
            text = f"neither {MEMORY} nor {tempfile.gettempdir()} has room for {size}: it is uploaded file by file"
        elif place == MEMORY:
            text = f"{MEMORY} has room for {size} again"
        else:
            text = f"{MEMORY} has no room for {size}: it is staged in {place}"
        logger.warning(text)
        events.emit(events.StagedElsewhere(place=place or "store", reason=text))


def clear_left() -> None:
    """Removes the folders that killed processes left on this machine."""
    for place in {MEMORY, tempfile.gettempdir()}:
        scratch.clear_left(place)


def _has_room(place: str, num_bytes: int) -> bool:
    if not os.access(place, os.W_OK):
        return False
    wanted = int(num_bytes * MARGIN)
    if shutil.disk_usage(place).free < wanted:
        return False
    # tmpfs has its own limit and uses the machine's memory: both must have room.
    return place != MEMORY or psutil.virtual_memory().available >= wanted + LEFT_FREE
