"""Files of a download that are memory of this process: tensors are made of them without a copy.

They have no name but that of an open descriptor, so that no folder must have room for them, and what is mapped of them
stays when they are closed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping

LEAST = 2**20
"""Bytes from which on a file is held."""

NAMED = 60
"""Characters of a file's name that Linux is told, which takes 249 bytes."""


def can_hold() -> bool:
    """Tells whether this system has such files."""
    return hasattr(os, "memfd_create")


def place(folder: str, files: Mapping[str, int]) -> list[int]:
    """Puts links to empty files in memory where a download is to be, and returns their descriptors.

    Args:
        folder: Where the download will be.
        files: Bytes of each of its files, by relative name.
    """
    descriptors = []
    for name, size in files.items():
        if size >= LEAST:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptors.append(os.memfd_create(os.path.basename(name)[:NAMED]))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of an earlier try
            os.symlink(f"/proc/{os.getpid()}/fd/{descriptors[-1]}", path)
    return descriptors


def is_held(path: str) -> bool:
    """Tells whether a file is such a one of this process."""
    return os.path.islink(path) and os.readlink(path).startswith(f"/proc/{os.getpid()}/fd/")


@contextlib.contextmanager
def mapped(path: str) -> Iterator[None]:
    """Has `torch.load` map a file that is held, where the tensors that it returns are to be its only users.

    What is written to the tensors is written to the file: never one that others read.
    """
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
