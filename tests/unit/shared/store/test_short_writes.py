"""A disk that takes a part of what is written to it: an error, and never a file that is shorter than its digest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from fsspec import AbstractFileSystem
from obstore.store import MemoryStore, ObjectStore

from baton.store import clouds, errors
from baton.store.clouds import CloudStore

SIZE = 2 * clouds.RANGE + 1000
CONTENT = os.urandom(SIZE)


class Bucket(CloudStore):
    """Objects in memory, read as those of a cloud."""

    schemes = ("s3",)
    environment = ()
    words: ClassVar[errors.StoreMessages] = errors.StoreMessages()

    def _open(self) -> ObjectStore:
        store = MemoryStore()
        store.put("weights", CONTENT)
        return store

    def address(self) -> str:
        return "https://host"

    def file_system(self) -> AbstractFileSystem:
        raise NotImplementedError


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """Bounds files for a moment: Linux writes up to that, as a disk that is nearly full does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "room",
    [
        pytest.param(1000, id="in the first range"),
        pytest.param(clouds.RANGE, id="after the first range"),
        pytest.param(clouds.RANGE + 4096, id="in the second range"),
        pytest.param(SIZE - 1, id="at the last byte"),
    ],
)
def test_a_download_without_room_is_an_error(room: int, tmp_path: Path) -> None:
    bucket, path = Bucket("s3://bucket"), tmp_path / "weights"
    with path.open("wb") as file, limited(room), pytest.raises(OSError, match="File too large"):
        bucket._fetch_into("weights", file.fileno(), SIZE, hashlib.sha256())


def test_what_fits_is_what_was_sent(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with limited(SIZE):
        digest = Bucket("s3://bucket").download("weights", str(path), SIZE)
    assert path.read_bytes() == CONTENT
    assert digest == hashlib.sha256(CONTENT).hexdigest()
