"""Folders and fsspec's other file systems, with the methods that `components.shared.s3.S3` has."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, BinaryIO

BLOCK = 4 * 1024 * 1024
"""Bytes read at a time while a file is hashed on its way."""
OWN = ".baton-"
"""How the names of files begin that are none of the user's: written, but not yet in their place."""

TRIES = 100
"""Times that a file's folder is made while others remove it as empty."""


class Files:
    """Objects of an fsspec file system, by its own names for them."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def read(self, key: str) -> bytes:
        """Returns a whole object."""
        data: bytes = self.fs.cat_file(key)
        return data

    def write(self, key: str, data: bytes) -> None:
        """Writes a small object, replacing what was there."""
        self.fs.pipe_file(key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object unless there is one."""
        try:
            self.fs.pipe_file(key, data, mode="create")
        except FileExistsError:
            return False
        return True

    def size(self, key: str) -> int | None:
        """Returns an object's bytes, None where there is no object."""
        try:
            found = self.fs.info(key)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def list(self, key: str) -> list[str]:
        """Returns the names directly below a key."""
        try:
            found = self.fs.ls(key, detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def find(self, key: str) -> dict[str, tuple[int, datetime]]:
        """Returns size and time of all objects at any depth below a key, by key."""
        found = self.fs.find(key, detail=True)
        return {name: (int(entry["size"]), _time(entry)) for name, entry in found.items()}

    def remove(self, key: str) -> None:
        """Removes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(key)

    def tidy(self, key: str) -> None:
        """Removes an empty folder, where the file system has such."""

    def upload(self, local_path: str, key: str, seen: Callable[[memoryview], None]) -> None:
        """Copies a file into the store; `seen` is called with its bytes in their order, and may raise to stop."""
        with open(local_path, "rb") as source, self._target(key) as target:
            _copy(source, target, seen)

    def download(self, key: str, local_path: str, size: int) -> str:
        """Copies an object to a file and returns the SHA-256 of its bytes."""
        digest = hashlib.sha256()
        with self.fs.open(key, "rb") as source, open(local_path, "wb") as target:
            _copy(source, target, digest.update)
        return digest.hexdigest()

    def blocks(self, key: str) -> Iterator[bytes]:
        """Yields an object's bytes in order."""
        with self.fs.open(key, "rb") as source:
            while block := source.read(BLOCK):
                yield block

    def _target(self, key: str) -> Any:
        return self.fs.open(key, "wb")


class Folder(Files):
    """Files of a folder: written beside their place and moved there, so that readers see all or nothing."""

    def write(self, key: str, data: bytes) -> None:
        """Writes a file; readers see the old one or the new one."""
        with _sibling(key) as temporary:
            _write_synced(temporary, data)
            os.replace(temporary, key)

    def create(self, key: str, data: bytes) -> bool:
        """Writes a file unless there is one: a hard link, which the file system gives to one."""
        with _sibling(key) as temporary:
            _write_synced(temporary, data)
            try:
                os.link(temporary, key)
            except FileExistsError:
                return False
            return True

    def tidy(self, key: str) -> None:
        """Removes a folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(key)

    def _target(self, key: str) -> Any:
        return _opened(key)


def _copy(source: Any, target: Any, seen: Callable[[Any], None]) -> None:
    while block := source.read(BLOCK):
        seen(block)
        target.write(block)


def _time(entry: dict[str, Any]) -> datetime:
    found = entry.get("LastModified") or entry.get("mtime") or entry.get("last_modified") or 0
    return found if isinstance(found, datetime) else datetime.fromtimestamp(float(found), UTC)


@contextlib.contextmanager
def _sibling(key: str) -> Iterator[str]:
    """Yields a temporary name beside a file, so that a rename or link is atomic."""
    temporary = f"{os.path.dirname(key)}/{OWN}{uuid.uuid4().hex}"
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _opened(path: str) -> BinaryIO:
    """Opens a file to be written, in a folder that others tidy away whenever it is empty."""
    folder, tries = os.path.dirname(path), 0
    while True:
        tries += 1
        try:
            os.makedirs(folder, exist_ok=True)
            return open(path, "wb")
        except (FileNotFoundError, FileExistsError):  # tidied away meanwhile, or a file is in its place
            if os.path.isfile(folder):
                raise NotADirectoryError(f"{folder} is a file, expected a folder") from None
            if tries == TRIES:
                raise


def _write_synced(path: str, data: bytes) -> None:
    with _opened(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
