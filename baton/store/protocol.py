"""Protocol of a store, under which a folder and a cloud's objects behave alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import NamedTuple, Protocol

from baton.errors import StoreError

BLOCK = 4 * 1024 * 1024
"""Bytes read at a time while an object is hashed on its way."""
OWN = ".baton-"
"""Beginning of the names of temporary objects, which listings leave out."""


def below(root: str, path: str) -> str:
    """Returns the file system's name of an object; StoreError for one outside the store."""
    # Documents in the store name others, and may be forged. Clouds' clients refuse such a name too.
    if ".." in path.split("/"):
        raise StoreError(
            f"{path!r} leads out of the store {root}.",
            remedy="Find out who wrote the document that names it; nothing of Baton's does.",
        )
    return f"{root}/{path}".rstrip("/")


class ObjectInfo(NamedTuple):
    size: int
    modified: datetime
    """By the store's clock."""


class ObjectStore(Protocol):
    """Objects below one URI, by paths relative to it.

    Operations raise the client library's own errors, which `explain` translates; a missing object is a
    `FileNotFoundError`. A client is made without asking the store or looking for credentials: both wait for the first
    operation. `open_store` of `baton.store.storage` knows which client is whose.
    """

    @property
    def uri(self) -> str:
        """Address for people and other processes; never with credentials."""

    @property
    def root(self) -> str:
        """The address without its scheme: an absolute folder, or `bucket/prefix`."""

    @property
    def is_local(self) -> bool:
        """Whether objects are files of this machine, below `root`."""

    @property
    def create_is_certain(self) -> bool:
        """Whether every server of this kind lets one of two creators win; else `Storage` tries it once."""

    def read(self, path: str) -> bytes:
        """Returns a whole object."""

    def write(self, path: str, data: bytes) -> None:
        """Writes a small object, replacing what was there; readers see the old or the new one."""

    def create(self, path: str, data: bytes) -> bool:
        """Put-if-absent: writes a small object unless there is one, and tells whether it did."""

    def size(self, path: str) -> int | None:
        """Returns an object's bytes, None where there is no object."""

    def list(self, path: str) -> list[str]:
        """Returns the names directly below a path, in any order."""

    def find(self, path: str) -> dict[str, ObjectInfo]:
        """Returns all objects at any depth below a path, by their paths relative to it."""

    def remove(self, path: str) -> None:
        """Removes an object, if it is there."""

    def tidy(self, path: str) -> None:
        """Removes an empty folder, where the store has such."""

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        """Sends a file; `seen` is called with its bytes in order, and its error ends the upload."""

    def copy(self, source: str, path: str, size: int) -> bool:
        """Copies an object inside the store, where it can, and tells whether it did; both may share their bytes."""

    def download(self, path: str, local_path: str, size: int) -> str:
        """Fetches an object of known size to a file and returns the SHA-256 of its bytes."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields an object's bytes in order."""

    def explain(self, error: Exception, path: str | None = None) -> Exception:
        """Translates a client library's error; `path` was read past this client, and may be looked for by a listing."""
