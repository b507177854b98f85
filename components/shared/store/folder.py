"""A folder of this machine, or one that several mount: readers see all of a file or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from baton.components.shared.store.file_system import FileSystem
from baton.components.shared.store.object_store import OWN

TRIES = 100
"""Times that a file's folder is made while others remove it as empty."""
NO_LINK = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)
"""What `os.link` fails with where there can be no link."""


class Folder(FileSystem):
    """Files of a folder: small ones are written beside their place and moved there, uploads written in place.

    A writer that is killed leaves a `.baton-…` file, which no listing shows, or half an upload below its attempt's
    name, which no manifest names.

    Args:
        uri: A path or `file://…`.
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
