"""A disk that takes a part of what is written to it: an error, and never a file that is shorter than its digest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from baton.store import clouds
from baton.store.clouds import CloudStore

SIZE = 2 * clouds.RANGE + 1000
CONTENT = os.urandom(SIZE)


def bucket() -> CloudStore:
    """Objects in memory, read as those of a cloud."""
    store = MemoryStore()
    store.put("weights", CONTENT)
    return CloudStore("s3://bucket", replace(clouds.S3, open=lambda uri, bucket: store))


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
    client, path = bucket(), tmp_path / "weights"
    with path.open("wb") as file, limited(room), pytest.raises(OSError, match="File too large"):
        client._fetch_into("weights", file.fileno(), SIZE, hashlib.sha256())


def test_what_fits_is_what_was_sent(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with limited(SIZE):
        digest = bucket().download("weights", str(path), SIZE)
    assert path.read_bytes() == CONTENT
    assert digest == hashlib.sha256(CONTENT).hexdigest()
