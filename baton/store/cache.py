"""A node's cache of files by their SHA-256, which is checked at each read."""

import contextlib
import hashlib
import logging
import os
import shutil
import time
import uuid
from typing import Self

from baton.recipe.base import amount
from baton.recipe.run import Store

logger = logging.getLogger("baton")

# Age at which a file that is being copied into a cache counts as left by a process that died.
ABANDONED_AFTER_S = 3600.0


class NodeCache:
    """A folder that outlives pods on a node; at `max_bytes` the least recently used files are removed."""

    def __init__(self, folder: str, max_bytes: float) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    @classmethod
    def of(cls, store: Store) -> Self | None:
        if store.cache_dir is None:
            return None
        return cls(os.path.expanduser(store.cache_dir), amount(store.cache_size))

    def take(self, digest: str, local_path: str) -> bool:
        """Puts a cached file at a path, and tells whether it did: only bytes with this SHA-256."""
        path = os.path.join(self.folder, digest)
        os.makedirs(os.path.dirname(local_path), exist_ok=True)
        try:
            # Link first, then hash the link: another process may remove or replace the name in between.
            _link_or_copy(path, local_path)
        except OSError:
            return False
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(path)  # its last use, by which `_make_room` chooses
        with open(local_path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                return True
        logger.warning("cached file %s is damaged; it is fetched from the store", path)
        os.unlink(local_path)  # it is a link: a download to it would be written into the cache
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False

    def keep(self, digest: str, local_path: str) -> None:
        """Keeps a file that has this SHA-256, where the cache has room and can be written."""
        path = os.path.join(self.folder, digest)
        temporary = f"{path}.{uuid.uuid4().hex[:8]}"
        try:
            os.makedirs(self.folder, exist_ok=True)
            wanted = os.path.getsize(local_path)
            if os.path.exists(path) or wanted > self.max_bytes:
                return
            self._make_room(wanted)
            # Under another name and then renamed: another process must never link half a copy. After a crash,
            # `_make_room` removes the temporary once no process can be at it any more.
            _link_or_copy(local_path, temporary)
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("cache %s does not take %s: %s", self.folder, local_path, error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _make_room(self, wanted: int) -> None:
        entries = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process makes room as well
                state = entry.stat()
                if "." in entry.name and time.time() - state.st_mtime > ABANDONED_AFTER_S:
                    os.unlink(entry.path)
                    continue
                entries.append((state.st_mtime, state.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total + wanted <= self.max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            # Also where another process has removed it: the room is there either way.
            total -= size


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copyfile(source, target)
