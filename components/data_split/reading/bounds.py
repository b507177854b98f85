"""A bound on the memory that a library may take at once, where a few bytes can say that they are gigabytes."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

HELD = 2**31
"""Bytes that a part of a table may take: a page of Parquet or a batch of Arrow, unpacked, and its rows."""
_DATA = re.compile(rb"VmData:\s+(\d+) kB")


@contextlib.contextmanager
def bounded(most: int) -> Iterator[None]:
    """Has what takes more memory in the block fail with a `MemoryError`, in any thread of this process; on Linux.

    The system knows no bound of a thread, and Arrow's pools have none. Nothing else of Baton's runs beside a table that
    is read, so that nothing else meets it; a test holds that.

    Args:
        most: Bytes beyond those that the process has.
    """
    match = _DATA.search(Path("/proc/self/status").read_bytes()) if sys.platform == "linux" else None
    if match is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = int(match[1]) * 1024 + most
    limits = [each for each in (wanted, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
