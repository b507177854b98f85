"""Stores in a folder, of this machine or shared, and in any file system that fsspec knows.

In a folder readers see all of a file or nothing. A small file is written beside its place and moved there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import BinaryIO, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from baton.errors import StoreError
from baton.store import errors
from baton.store.protocol import BLOCK, OWN, Entry, below


class FileSystem:
    """Objects of an fsspec file system.

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
        return errors.explain(error, self.uri, errors.StoreMessages())

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


TRIES = 100
"""Times that a file's folder is made while others remove it as empty."""
NO_LINK = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)
"""What `os.link` fails with where there can be no link."""


class Folder(FileSystem):
    """Files of a folder: small ones are written beside their place and moved there, uploads written in place.

    A writer that is killed leaves a `.baton-…` file, which no listing shows, or half an upload below its attempt's
    name, which no manifest names.
    """

    is_local = True
    create_is_certain = True

    def __init__(self, uri: str) -> None:
        super().__init__(uri, auto_mkdir=True)

    def write(self, path: str, data: bytes) -> None:
        """Writes a file; readers see the old one or the new one."""
        with _sibling(self._key(path)) as temporary:
            _write_synced(temporary, data)
            os.replace(temporary, self._key(path))

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file unless there is one: a hard link, which the file system gives to one."""
        with _sibling(self._key(path)) as temporary:
            _write_synced(temporary, data)
            try:
                # Not a rename, which would replace what is there. The name appears with all its bytes, which are on the
                # disk by then.
                os.link(temporary, self._key(path))
            except FileExistsError:
                return False
            return True

    def copy(self, source: str, path: str, size: int) -> bool:
        """Gives a file a second name, a hard link, where the file system has such: both have the same bytes."""
        target = self._key(path)
        for _ in range(TRIES):
            with _sibling(target) as temporary:
                try:
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    os.link(self._key(source), temporary)
                    os.replace(temporary, target)
                    return True
                except FileNotFoundError:  # the source is gone, or the folder was tidied away meanwhile
                    if not os.path.exists(self._key(source)):
                        raise
                except OSError as error:
                    if error.errno not in NO_LINK:
                        raise
                    return False
        return False

    def tidy(self, path: str) -> None:
        """Removes a folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(self._key(path))

    def _opened(self, path: str) -> BinaryIO:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._key(path))  # it may share its bytes: written over, those of its source would change
        return _opened(self._key(path))


@contextlib.contextmanager
def _sibling(key: str) -> Iterator[str]:
    """Yields a temporary name beside a file: in the same file system, so that a rename or link is atomic."""
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
            time.sleep(tries / 10_000)  # at one pace, whoever tidies could come in between each time


def _write_synced(path: str, data: bytes) -> None:
    with _opened(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # before the rename: else a crash could leave the name of an empty file
