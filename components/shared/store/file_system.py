"""Any store that fsspec knows, by way of its file systems: `memory://`, `sftp://`, `hf://`, …"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import BinaryIO, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from baton.components.shared.core.errors import StoreError
from baton.components.shared.store import errors
from baton.components.shared.store.object_store import BLOCK, Entry, below


class FileSystem:
    """Objects of an fsspec file system.

    Args:
        uri: An address whose protocol fsspec knows.
        options: For the file system.

    Raises:
        StoreError: the protocol is unknown, or what it needs is not installed.
    """

    is_local = False
    create_is_certain = False

    def __init__(self, uri: str, **options: object) -> None:
        try:
            self._fs = cast(AbstractFileSystem, url_to_fs(uri, **options)[0])
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise StoreError(
                f"store {uri!r} cannot be opened: {error}.",
                remedy="Use a folder, s3://bucket, gs://bucket or az://container.",
            ) from None
        self.root = str(self._fs._strip_protocol(uri)).rstrip("/")
        if not self.is_local and not self.root:
            scheme = uri.partition("://")[0]
            raise StoreError(
                f"store {uri!r} names no bucket.", remedy=f"Use {scheme}://bucket or {scheme}://bucket/prefix."
            )
        self.uri = self.root if self.is_local else str(self._fs.unstrip_protocol(self.root))

    def read(self, path: str) -> bytes:
        """Returns a whole object."""
        return bytes(self._fs.cat_file(self._key(path)))

    def write(self, path: str, data: bytes) -> None:
        """Writes a small object, replacing what was there."""
        self._fs.pipe_file(self._key(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object unless there is one."""
        try:
            self._fs.pipe_file(self._key(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def size(self, path: str) -> int | None:
        """Returns an object's bytes, None where there is no object."""
        try:
            entry = self._fs.info(self._key(path))
        except FileNotFoundError:
            return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def list(self, path: str) -> list[str]:
        """Returns the names directly below a path."""
        try:
            names = self._fs.ls(self._key(path), detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in names]

    def find(self, path: str) -> dict[str, Entry]:
        """Returns all objects at any depth below a path, by their paths relative to it."""
        below = self._key(path)
        entries = self._fs.find(below, detail=True)
        return {
            key.removeprefix(below).lstrip("/"): Entry(int(entry["size"]), _time(entry))
            for key, entry in entries.items()
        }

    def remove(self, path: str) -> None:
        """Removes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._key(path))

    def tidy(self, path: str) -> None:
        """Does nothing: not every file system has folders that could be left empty."""

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        """Copies a file into the store; `seen` is called with its bytes in their order, and may raise to stop."""
        # Not atomic: a writer that is killed leaves half a file. A bundle's lie below the name of an attempt, and no
        # manifest or note of a part names it then; what else is sent this way is nothing that a run resumes from.
        with open(local_path, "rb") as source, self._opened(path) as target:
            _copy(source, target, seen)

    def copy(self, source: str, path: str, size: int) -> bool:
        """Copies nothing: few file systems can without moving the bytes through this machine."""
        return False

    def download(self, path: str, local_path: str, size: int) -> str:
        """Copies an object to a file and returns the SHA-256 of its bytes."""
        digest = hashlib.sha256()
        with self._fs.open(self._key(path), "rb") as source, open(local_path, "wb") as target:
            _copy(source, target, digest.update)
        return digest.hexdigest()

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields an object's bytes in order."""
        with self._fs.open(self._key(path), "rb") as source:
            while block := source.read(BLOCK):
                yield block

    def explain(self, error: Exception, path: str | None = None) -> Exception:
        """Returns what to raise in place of a file system's error."""
        return errors.explain(error, self.uri, errors.Words())

    def file_system(self) -> AbstractFileSystem:
        """Returns the file system itself."""
        return self._fs

    def _key(self, path: str) -> str:
        return below(self.root, path)

    def _opened(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Opens an object to be written."""
        return cast(AbstractContextManager[BinaryIO], self._fs.open(self._key(path), "wb"))


def _copy(source: BinaryIO, target: BinaryIO, seen: Callable[[bytes], None]) -> None:
    while block := source.read(BLOCK):
        seen(block)
        target.write(block)


def _time(entry: dict[str, object]) -> datetime:
    written = entry.get("LastModified") or entry.get("mtime") or entry.get("last_modified") or 0
    return written if isinstance(written, datetime) else datetime.fromtimestamp(float(str(written)), UTC)
