"""Columnar files: Parquet and Arrow, in batches whose values are checked before they are touched."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from baton.components.data_split.reading.bounds import HELD, bounded
from baton.components.data_split.reading.streams import blocks, packing
from baton.components.data_split.reading.text_files import TOO_LONG
from baton.components.data_split.rows import MAX_ROW, Rejected, Row, UnreadableError
from baton.components.shared.store.sources import SourceFile

STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream that was closed; without them it may have been cut between two batches."""
T = TypeVar("T")
BATCH = 256
"""Rows turned into Python's values at once."""
BUFFER = 2**22
"""Bytes of a Parquet column read at once; with `pre_buffer`, a row group of 300 MB took 323 MB and not 44."""


def parquet(file: SourceFile) -> Iterator[Row | Rejected]:
    """Reads a Parquet file.

    Raises:
        UnreadableError: it breaks off or is not what it should be.
    """
    import pyarrow.parquet

    with _opened(file, cache_type="none") as opened:

        def batches() -> Iterator[Any]:
            table = pyarrow.parquet.ParquetFile(opened, buffer_size=BUFFER, pre_buffer=False)
            count = 0
            for at in range(table.num_row_groups):
                group = table.metadata.row_group(at)
                # Long rows are read few at a time; a file's own word about its sizes is not trusted, see `bounded`.
                fit = MAX_ROW * group.num_rows // max(group.total_byte_size, 1)
                for batch in table.iter_batches(min(max(fit, 1), BATCH), row_groups=[at]):
                    count += batch.num_rows
                    yield batch
            if count != table.metadata.num_rows:
                raise ValueError(f"it holds {count} rows, and says {table.metadata.num_rows}")

        yield from _guarded(file.uri, "Parquet", batches)


def arrow(file: SourceFile) -> Iterator[Row | Rejected]:
    """Reads an Arrow file or stream, such as `save_to_disk` of `datasets` writes.

    A batch is held whole, see `bounds.HELD`.

    Raises:
        UnreadableError: it breaks off or is not what it should be.
    """
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
    """Opens a file that is not read from front to end; a packed one is unpacked to disk.

    Args:
        file: The file.
        options: For the file system. Columns are read in turns, which an S3 client that reads ahead would do in vain.
    """
    with file.storage.translated(), file.storage.fs.open(file.storage.key(file.path), "rb", **options) as opened:
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


def _guarded(file: str, kind: str, open_batches: Any) -> Iterator[Row | Rejected]:
    import pyarrow

    number = 1
    batches = iter(open_batches())
    try:
        while (batch := _within_bounds(lambda: next(batches, None))) is not None:
            for start in range(0, batch.num_rows, BATCH):
                for values in _values(batch.slice(start, BATCH)):
                    place = (file, number)
                    yield Row(*place, values) if isinstance(values, dict) else Rejected(*place, values, "")
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError) as error:
        if getattr(error, "errno", None):  # of the store, not of the content
            raise
        raise UnreadableError(f"broken {kind}: {' '.join(str(error).split())}", number) from None


def _within_bounds(work: Callable[[], T]) -> T:
    """Does what may take as much memory as a file says.

    Raises:
        ValueError: it takes more than it may.
    """
    try:
        with bounded(HELD):
            return work()
    except MemoryError:
        raise ValueError(
            f"it takes more than {HELD >> 30} GiB at once; write it in smaller pages, row groups or batches"
        ) from None


def _values(batch: Any) -> Iterator[dict[str, object] | str]:
    """Yields the rows of a batch, or why a row is none; a file's own word about its buffers is not trusted."""
    import pyarrow

    try:
        batch.validate(full=True)
        if batch.nbytes <= MAX_ROW:
            yield from _within_bounds(batch.to_pylist)
            return
        if batch.num_rows == 1:
            whole = sum(_decoded(column).nbytes for column in batch.columns)
            yield TOO_LONG if whole > MAX_ROW else _within_bounds(batch.to_pylist)[0]
            return
    except (pyarrow.ArrowInvalid, ValueError) as error:
        if batch.num_rows <= 1:
            yield f"broken value: {' '.join(str(error).split())}"
            return
    # One by one, where one is broken, or all of them would be much at once.
    for at in range(batch.num_rows):
        yield from _values(batch.slice(at, 1))


def _decoded(column: Any) -> Any:
    """Returns a column with values in place of the numbers of values that many rows share."""
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
