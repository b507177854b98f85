"""Columnar files, Parquet and Arrow, read in batches that are checked first, within a bound of memory.

A few bytes of such a file can claim to be gigabytes. A library that would allocate them gets a `MemoryError`.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from baton.data.files import blocks, packing
from baton.data.rows import MAX_ROW, SHOWN, TOO_LONG, SourceRow, UnreadableError, UnusableRow, as_read
from baton.store.sources import SourceFile

HELD = 2**31  # bytes for a part of a table, unpacked, and its rows: a page of Parquet or a batch of Arrow
_DATA = re.compile(rb"VmData:\s+(\d+) kB")


@contextlib.contextmanager
def bounded(most: int) -> Iterator[None]:
    """Limits the memory that the block adds, in any thread of the process; a `MemoryError` beyond it. On Linux.

    The system knows no bound of a thread, and Arrow's pools have none. Nothing else of Baton's runs beside the reading
    of a table, so that nothing else meets the limit; a test holds that.
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


STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a closed Arrow stream; without them it may have been cut between two batches."""
T = TypeVar("T")
BATCH = 256  # rows turned into Python's values at once; fewer where they have more bytes than one row may
LARGEST_PAGE = 2**28
PER_PAGE = LARGEST_PAGE // 1024
PACKED = 500
"""A larger column may have at most this many times its packed bytes, unless its values are shorter than `PER_PAGE` on
average; text has ten times."""
BUFFER = 2**22
"""Bytes of a Parquet column read at once; with `pre_buffer`, a row group of 300 MB took 323 MB and not 44."""


def read_parquet(file: SourceFile) -> Iterator[SourceRow | UnusableRow]:
    import pyarrow.parquet

    with _opened(file, cache_type="none") as opened:

        def batches() -> Iterator[Any]:
            table = pyarrow.parquet.ParquetFile(opened, buffer_size=BUFFER, pre_buffer=False)
            count = 0
            for number in range(table.num_row_groups):
                for batch in table.iter_batches(_at_once(table.metadata.row_group(number)), row_groups=[number]):
                    count += batch.num_rows
                    yield batch
            if count != table.metadata.num_rows:
                raise ValueError(f"it holds {count} rows, and says {table.metadata.num_rows}")

        yield from _guarded(file.uri, "Parquet", batches)


def _at_once(group: Any) -> int:
    """Returns how many rows of a row group to read at once; raises ValueError where it unpacks to far too much."""
    for column in map(group.column, range(group.num_columns)):
        size, packed = column.total_uncompressed_size, max(1, column.total_compressed_size)
        # A page is unpacked whole, and writers put up to a thousand values in one: 20 of 50 MB, packed to 32 kB, took
        # 3 GB. Of short values, pages are small however well they are packed.
        if size > max(LARGEST_PAGE, PER_PAGE * column.num_values) and size > PACKED * packed:
            raise ValueError(f"{packed:,} bytes of column {column.path_in_schema} unpack to {size:,}")
    return max(1, min(BATCH, MAX_ROW * group.num_rows // max(1, group.total_byte_size)))


def read_arrow(file: SourceFile) -> Iterator[SourceRow | UnusableRow]:
    """Reads an Arrow file or stream, such as `save_to_disk` of `datasets` writes, by whole batches; see `HELD`."""
    import pyarrow

    with _opened(file) as opened:

        def batches() -> Iterator[Any]:
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(opened)
                yield from (reader.get_batch(at) for at in range(reader.num_record_batches))
                return
            yield from pyarrow.ipc.open_stream(opened)
            position, end = opened.tell(), opened.seek(0, os.SEEK_END)
            opened.seek(max(end - len(STREAM_END), 0))
            if position < end or opened.read() != STREAM_END:
                raise ValueError("it stops before its end")

        yield from _guarded(file.uri, "Arrow", batches)


@contextlib.contextmanager
def _opened(file: SourceFile, **options: Any) -> Iterator[Any]:
    """Opens a file for random access; a packed one is unpacked to disk.

    Options are the file system's: an S3 client that reads ahead would do so in vain, as columns are read in turns.
    """
    with file.open(**options) as opened:
        packed = packing(file.path, opened.read(8))
        opened.seek(0)
        if packed is None:
            yield opened
            return
    with tempfile.TemporaryFile(prefix="baton-source-") as unpacked:
        for block in blocks(file):
            unpacked.write(block)
        unpacked.seek(0)
        yield unpacked


def _guarded(file: str, kind: str, open_batches: Any) -> Iterator[SourceRow | UnusableRow]:
    import pyarrow

    number = 1
    batches = iter(open_batches())
    try:
        while (batch := _within_bounds(lambda: next(batches, None))) is not None:
            for start in range(0, batch.num_rows, BATCH):
                for values in _values(batch.slice(start, BATCH)):
                    place = (file, number)
                    yield SourceRow(*place, values) if isinstance(values, dict) else UnusableRow(*place, *values)
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError) as error:
        if getattr(error, "errno", None):  # of the store, not of the content
            raise
        raise UnreadableError(f"broken {kind}: {' '.join(str(error).split())}", number) from None


def _within_bounds(work: Callable[[], T]) -> T:
    """Runs work whose memory the file decides; raises ValueError where that is more than `HELD`."""
    try:
        with bounded(HELD):
            return work()
    except MemoryError:
        raise ValueError(
            f"it takes more than {HELD >> 30} GiB at once; write it in smaller pages, row groups or batches"
        ) from None


def _values(batch: Any) -> Iterator[dict[str, object] | tuple[str, str]]:
    """Yields the rows of a batch, or the problem with a row and its beginning.

    A file's own word about its buffers is not trusted, and no more is held in Python's values than a row may have.
    """
    import pyarrow

    rows: list[dict[str, object]] | None = None
    try:
        batch.validate(full=True)
        problem, raw = TOO_LONG, ""
        if sum(map(_num_bytes, batch.columns)) <= MAX_ROW:
            rows = _within_bounds(batch.to_pylist)
        elif batch.num_rows == 1:
            raw = _beginning(batch)
    except (pyarrow.ArrowInvalid, ValueError) as error:
        problem, raw = f"broken value: {' '.join(str(error).split())}", ""
    if rows is not None:
        yield from rows
    elif batch.num_rows == 1:
        yield problem, raw
    else:
        half = batch.num_rows // 2
        yield from _values(batch.slice(0, half))
        yield from _values(batch.slice(half))


def _num_bytes(column: Any) -> int:
    """Returns a column's bytes when each value is written out: a file may have a value once for many."""
    import numpy as np
    from pyarrow import compute, types

    kind = column.type
    if types.is_dictionary(kind):
        if types.is_string(kind.value_type) or types.is_large_string(kind.value_type):
            return compute.sum(compute.take(compute.binary_length(column.dictionary), column.indices)).as_py() or 0
        return len(column) * int(column.dictionary.nbytes)
    if types.is_run_end_encoded(kind):
        return len(column) * int(column.values.nbytes)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        if column.null_count == len(column):
            return 0
        # The first four of the 16 bytes of each are its length.
        views = np.frombuffer(column.buffers()[1], dtype="<i4")[::4][column.offset : column.offset + len(column)]
        return int(views.sum(where=np.asarray(column.is_valid()), dtype=np.int64))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * len(column) + _num_bytes(column.flatten())
    if types.is_struct(kind):
        return sum(map(_num_bytes, column.flatten()))
    return int(column.nbytes)


def _beginning(batch: Any) -> str:
    import pyarrow

    parts = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = column[0].value if isinstance(column[0], pyarrow.DictionaryScalar) else column[0]
        data = value.as_buffer() if isinstance(value, pyarrow.BinaryScalar) else None
        parts.append(f"{name}: ".encode() + (bytes(data.slice(0, min(SHOWN, data.size))) if data else b"\xe2\x80\xa6"))
    return as_read(b", ".join(parts)[:SHOWN])
