"""A store in a folder of this machine or one that several mount, and in any file system that fsspec knows.

Readers of a folder see all of a small file or nothing: it is written under a temporary name and moved. Uploads are
written in place. A killed writer's remains are a `.baton-…` file, which no listing shows, or half an upload below the
name of its attempt, which no manifest names.
"""

import contextlib
import errno
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, BinaryIO, cast

from baton.errors import StoreError
from baton.store import protocol
from baton.store.clouds import ANY_BUCKET
from baton.store.protocol import BLOCK, OWN, ObjectInfo, below

TRIES = 100  # attempts to make a file's folder while others remove it as empty
# Errors of `os.link` where a file system has no links, or not this one.
NO_LINK = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)


class _Files:
    """Downloads, blocks and errors of a folder and of any file system; `_reading` opens a file of it."""

    uri: str
    root: str

    def _reading(self, path: str) -> BinaryIO:
        raise NotImplementedError

    def download(self, path: str, local_path: str, size: int) -> str:
        digest = hashlib.sha256()
        with self._reading(path) as source, open(local_path, "wb") as target:
            _copy(source, target, digest.update)
        return digest.hexdigest()

    def blocks(self, path: str) -> Iterator[bytes]:
        with self._reading(path) as source:
            while block := source.read(BLOCK):
                yield block

    def explain(self, error: Exception, path: str | None = None) -> Exception:
        return protocol.explain(error, self.uri, protocol.StoreMessages())

    def _key(self, path: str) -> str:
        return below(self.root, path)


class Folder(_Files):
    """Files of a folder, at a path or `file://…`."""

    is_local = True
    create_is_certain = True

    def __init__(self, uri: str) -> None:
        path = os.path.expanduser(uri.removeprefix("file:").removeprefix("//" if uri.startswith("file://") else ""))
        self.uri = self.root = os.path.join(os.getcwd(), "" if path == "." else path.removeprefix("./")).rstrip("/")

    def _reading(self, path: str) -> BinaryIO:
        return open(self._key(path), "rb")

    def read(self, path: str) -> bytes:
        with self._reading(path) as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        with _sibling(self._key(path)) as temporary:
            _write_synced(temporary, data)
            os.replace(temporary, self._key(path))

    def create(self, path: str, data: bytes) -> bool:
        with _sibling(self._key(path)) as temporary:
            _write_synced(temporary, data)
            try:
                # Not a rename, which would replace a file. Of two links one wins; its bytes are on the disk already.
                os.link(temporary, self._key(path))
            except FileExistsError:
                return False
            return True

    def size(self, path: str) -> int | None:
        try:
            status = os.stat(self._key(path))
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, path: str) -> list[str]:
        try:
            return os.listdir(self._key(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def find(self, path: str) -> dict[str, ObjectInfo]:
        below, found = self._key(path), dict[str, ObjectInfo]()
        for parent, _, names in os.walk(below):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # gone since the folder was read
                    status = os.stat(os.path.join(parent, name))
                    modified = datetime.fromtimestamp(status.st_mtime, UTC)
                    found[os.path.join(parent, name)[len(below) + 1 :]] = ObjectInfo(status.st_size, modified)
        return found

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._key(path))

    def tidy(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._key(path))

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._key(path))  # it may be a hard link: written over, its source's bytes would change
        with open(local_path, "rb") as source, _opened(self._key(path)) as target:
            _copy(source, target, seen)

    def copy(self, source: str, path: str, size: int) -> bool:
        # By a hard link: no byte is read, and both names share them.
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


@contextlib.contextmanager
def _sibling(key: str) -> Iterator[str]:
    """Yields a temporary name in a file's folder: the same file system, so that a rename or link is atomic."""
    temporary = f"{os.path.dirname(key)}/{OWN}{uuid.uuid4().hex}"
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _opened(path: str) -> BinaryIO:
    """Opens a file for writing, in a folder that others tidy away whenever it is empty."""
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
            time.sleep(tries / 10_000)  # at a constant pace, the other process could come in between each time


def _write_synced(path: str, data: bytes) -> None:
    with _opened(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # before the rename: else a crash could leave the name of an empty file


def _copy(source: BinaryIO, target: BinaryIO, seen: Callable[[bytes], None]) -> None:
    while block := source.read(BLOCK):
        seen(block)
        target.write(block)


class FileSystem(_Files):
    """Objects of any file system that fsspec knows and has installed: `memory://`, `sftp://`, `hf://`, …"""

    is_local = False
    create_is_certain = False

    def __init__(self, uri: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self.fs: Any = url_to_fs(uri)[0]
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise StoreError(
                f"store {uri!r} cannot be opened: {error}.",
                remedy=f"Use a folder, or a bucket at {ANY_BUCKET}.",
            ) from None
        self.root = str(self.fs._strip_protocol(uri)).rstrip("/")
        if not self.root:
            scheme = uri.partition("://")[0]
            raise StoreError(
                f"store {uri!r} names no bucket.", remedy=f"Use {scheme}://bucket or {scheme}://bucket/prefix."
            )
        self.uri = str(self.fs.unstrip_protocol(self.root))

    def _reading(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self.fs.open(self._key(path), "rb"))

    def read(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(self._key(path)))

    def write(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(self._key(path), data)

    def create(self, path: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(self._key(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def size(self, path: str) -> int | None:
        try:
            entry = self.fs.info(self._key(path))
        except FileNotFoundError:
            return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def list(self, path: str) -> list[str]:
        try:
            names = self.fs.ls(self._key(path), detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in names]

    def find(self, path: str) -> dict[str, ObjectInfo]:
        below, found = self._key(path), dict[str, ObjectInfo]()
        for key, entry in self.fs.find(below, detail=True).items():
            written = entry.get("LastModified") or entry.get("mtime") or entry.get("last_modified") or 0
            if not isinstance(written, datetime):
                written = datetime.fromtimestamp(float(str(written)), UTC)
            found[key.removeprefix(below).lstrip("/")] = ObjectInfo(int(entry["size"]), written)
        return found

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._key(path))

    def tidy(self, path: str) -> None:
        """Does nothing: not every file system has folders."""

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        # Not atomic: half a file may remain after a kill. In a bundle no manifest or note of a part names it then; no
        # run resumes from other files that are sent this way.
        with open(local_path, "rb") as source, self.fs.open(self._key(path), "wb") as target:
            _copy(source, target, seen)

    def copy(self, source: str, path: str, size: int) -> bool:
        """Copies nothing: most file systems would move the bytes through this machine."""
        return False
