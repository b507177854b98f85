"""Reads a source's files of every type, told by content, and yields unreadable parts as `UnusableRow`.

Files are streams: unpacked and decoded on the way, and read line by line as JSON lines, CSV or text, or value by value
as JSON. Parquet and Arrow are read in batches that are checked first: a few bytes of such a file can claim to be
gigabytes, and a library that would allocate them gets a `MemoryError`. Memory does not grow with the file.
Docstrings of the standard library are a source too: real text on every machine with Python.
"""

from __future__ import annotations

import ast
import bz2
import codecs
import contextlib
import csv
import functools
import gzip
import io
import json
import lzma
import os
import re
import resource
import sys
import sysconfig
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

from baton.data import rows
from baton.data.rows import MAX_ROW, SHOWN, TOO_LONG, SourceRow, UnreadableError, UnusableRow, as_read
from baton.errors import UserError
from baton.recipe.data import Csv
from baton.store import sources

BLOCK = 2**20  # bytes read at once

ZSTD_BLOCK = 2**9
"""Bytes unpacked at once by zstd, which has no limit on what comes out: 128 KiB for each 4 bytes at the most."""

PACKINGS = {
    ".gz": (b"\x1f\x8b\x08",),
    ".bz2": (b"BZh",),
    ".xz": (b"\xfd7zXZ\x00",),
    ".zst": (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
}
"""First bytes of packed files; zstd's second kind is a frame to be skipped, which parallel packers write first."""


MARKS = (
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
"""First bytes of a text that is not UTF-8, and its encoding."""


class Line(NamedTuple):
    """A line with its end, or the first bytes of one that is longer than a row may be."""

    number: int
    data: bytes
    too_long: bool = False


def packing(path: str, head: bytes) -> str | None:
    """Returns `.gz`, `.bz2`, `.xz` or `.zst` by a file's first bytes, None for others.

    Raises:
        UnreadableError: it has the name of a packed file and does not begin like one.
    """
    for kind, signs in PACKINGS.items():
        named = path.lower().endswith(kind)
        if head.startswith(signs) and (named or kind != ".bz2" or head[4:8] == b"1AY&"):  # a text may begin with BZh
            return kind
        if named and head:
            raise UnreadableError(f"cannot be decompressed: it does not begin like {kind[1:]}")
    return None


def blocks(file: sources.SourceFile) -> Generator[bytes, None, None]:
    """Yields a file's bytes, unpacked; raises UnreadableError, after the good ones, where a packed file is damaged."""
    with file.open() as opened:
        head = opened.read(8)
        opened.seek(0)
        kind = packing(file.path, head)
        if kind is None:
            yield from iter(lambda: opened.read(BLOCK), b"")
            return
        unpack = _unzstd(opened) if kind == ".zst" else _unpack(opened, kind)
        while block := _next(unpack):
            yield block


def _next(unpack: Iterator[bytes]) -> bytes:
    import zstandard

    try:
        return next(unpack, b"")
    except (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        if getattr(error, "errno", None):  # of the store, not of the content
            raise
        raise UnreadableError(f"cannot be decompressed: {error}") from None


def _unpack(opened: Any, kind: str) -> Iterator[bytes]:
    unpacker: Any = {".gz": lambda file: gzip.GzipFile(fileobj=file), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}[kind]
    unpacked = unpacker(opened)
    return iter(lambda: unpacked.read1(BLOCK), b"")  # read1: returns the bytes before damage


def _unzstd(opened: Any) -> Iterator[bytes]:
    """Unpacks frames; the library's own stream reader takes a file that breaks off for one that ends."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
    frame, data, began = decompressor.decompressobj(), b"", False
    while data := data or opened.read(ZSTD_BLOCK):
        unpacked = frame.decompress(data)
        began, data = True, b""
        if frame.eof:
            data, frame, began = frame.unused_data, decompressor.decompressobj(), False
        if unpacked:
            yield unpacked
    if began:
        raise EOFError("Compressed file ended before the end of a frame")


def marked_encoding(head: bytes) -> str | None:
    """Returns the encoding of a text's byte order mark, None for UTF-8 or no mark."""
    return next((encoding for mark, encoding in MARKS if head.startswith(mark)), None)


def text_blocks(stream: Iterable[bytes], encoding: str | None = None) -> Iterator[bytes]:
    """Yields a text as UTF-8, without its byte order mark.

    Without a mark it is in the given encoding, or UTF-8. Undecodable bytes pass through, so that only their row is
    lost.

    Raises:
        UnreadableError: it breaks off within a character, or holds one that its encoding does not have.
    """
    decoder: codecs.IncrementalDecoder | None = None
    errors = "surrogateescape"
    try:
        for position, block in enumerate(stream):
            if position == 0 and (encoding := marked_encoding(block) or encoding):
                errors = "surrogatepass" if "utf-" in codecs.lookup(encoding).name else errors
                if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig"):
                    decoder = codecs.getincrementaldecoder(encoding)(errors)
            if decoder:
                yield decoder.decode(block).encode("utf-8", errors).removeprefix(b"" if position else b"\xef\xbb\xbf")
            else:
                yield block if position else block.removeprefix(b"\xef\xbb\xbf")
        if decoder:
            yield decoder.decode(b"", final=True).encode("utf-8", errors)
    except UnicodeError as error:
        raise UnreadableError(f"not {encoding}: {error}") from None


def lines(stream: Iterable[bytes], end: bytes = b"\n") -> Iterator[Line]:
    """Yields lines with their ends; raises UnreadableError, with the line so far, where the text breaks off."""
    number, size, parts = 1, 0, io.BytesIO()

    def taken(more: bytes) -> None:
        nonlocal size
        # Of a line that is too long only the beginning is kept, so that memory stays bounded.
        room = (MAX_ROW if size + len(more) <= MAX_ROW else SHOWN) - parts.tell()
        parts.write(more[: max(room, 0)])
        size += len(more)

    def line() -> Line:
        return Line(number, parts.getvalue()[: MAX_ROW if size <= MAX_ROW else SHOWN], size > MAX_ROW)

    try:
        for block in stream:
            *whole, last = block.split(end)
            for piece in whole:
                if size or len(piece) >= MAX_ROW:
                    taken(piece + end)
                    yield line()
                    size, parts = 0, io.BytesIO()
                else:
                    yield Line(number, piece + end)
                number += 1
            taken(last)
    except UnreadableError as error:
        raise UnreadableError(error.reason, number, error.raw or line().data) from None
    if size:
        yield line()


csv.field_size_limit(MAX_ROW)

MAX_LINES = 100_000  # lines of the longest CSV record: a quote that is not closed takes no more along
SEPARATORS = (",", "\t", ";", "|")  # signs between the fields of a CSV
LOOKED_AT, SAMPLED = 20, 2**18
"""Lines or records that tell how a file is written, and bytes of them; a block of a packed file may have many more."""
EXCELS = re.compile(rb'"?sep=(.)"?\s*')  # line that gives Excel the separator
STRAY = re.compile(r'\s+"|(?:[^"]*"[^"]*")*[^"]*"[^"]*')
"""A field that was cut within quotes, or whose quotes come after a space."""
HIGH = re.compile(rb"[^\s,;|]*[\x80-\xff][^\s,;|]*")
NOTHING = " \t\r\n\x1a"  # empty fields, and the sign that ends a file of DOS

ESCAPED = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8 travel through parsers as these, so that only their row is lost."""


def decode_line(file: str, line: Line, data: bytes) -> str | UnusableRow:
    if line.too_long:
        return UnusableRow(file, line.number, TOO_LONG, as_read(data))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return UnusableRow(file, line.number, f"not UTF-8 at byte {error.start}", as_read(data))


def read_jsonl(file: str, lines: Iterator[Line]) -> Iterator[SourceRow | UnusableRow]:
    for line in lines:
        if not line.data.strip():
            continue
        text = decode_line(file, line, line.data.rstrip(b"\r\n"))
        if isinstance(text, UnusableRow):
            yield text
            continue
        try:
            value = rows.loads(text, rows.DECODER)
        except ValueError as error:  # also a key that is there twice
            yield UnusableRow(file, line.number, f"broken JSON: {error}", text)
        else:
            yield as_row(file, line.number, value, text)


def as_row(file: str, number: int, value: Any, raw: str) -> SourceRow | UnusableRow:
    if not isinstance(value, dict):
        return UnusableRow(file, number, f"a JSON {type(value).__name__}, expected an object", raw)
    return SourceRow(file, number, value)


class _Record:
    """Lines for the CSV parser, with the lines of its current record."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self.begin()

    def __iter__(self) -> _Record:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.taken.append(line)
        self._size += len(line.data)
        if line.too_long or self._size > MAX_ROW:
            raise csv.Error(TOO_LONG)
        if len(self.taken) > MAX_LINES:
            raise csv.Error(f"longer than {MAX_LINES} lines")
        return line.data.decode("utf-8", "surrogateescape")

    def begin(self) -> None:
        self.taken: list[Line] = []
        self._size = 0

    def rejected(self, file: str, reason: str) -> Iterator[UnusableRow]:
        for line in self.taken:
            if line.data.strip():
                yield UnusableRow(file, line.number, reason, as_read(line.data))


def read_delimited(
    file: str, lines: Iterator[Line], sample: bytes, separator: str | None = None
) -> Iterator[SourceRow | UnusableRow]:
    """Reads a CSV with a header, as spreadsheets and databases write it.

    A quote that is never closed takes the lines after it along, up to the longest record: each counts as rejected.
    Records without a value, such as those below a table in a spreadsheet, are skipped; so are empty columns without a
    name. The separator is found in the sample, the file's beginning, when left out.
    """
    first = next((line for line in lines if line.data.strip()), None)
    if first is not None and (told := EXCELS.fullmatch(first.data)):
        separator, sample = separator or told[1].decode("latin-1"), sample.partition(first.data)[2]
        first = next((line for line in lines if line.data.strip()), None)
    if first is None:
        return
    sample = sample[:SAMPLED]
    dialect = _dialect(sample, separator)
    record = _Record(chain([first], lines))
    reader = csv.reader(record, strict=True, **dialect)
    guess = functools.cache(lambda: _remedy(sample))
    try:
        names, problem = _header(reader)
        if problem:
            while record.taken:  # without a header no line can be read
                yield from record.rejected(file, f"broken CSV header: {problem}")
                record.taken = list(islice(lines, 1))
            return
        record.begin()
        while (row := _row(file, record, reader, names, dialect["delimiter"], guess)) is not None:
            yield from row
            record.begin()
    except UnreadableError as error:
        number = record.taken[0].number if record.taken else error.line
        raise UnreadableError(error.reason, number, b"".join(line.data for line in record.taken) + error.raw) from None


def _dialect(sample: bytes, separator: str | None) -> dict[str, Any]:
    """Returns the separator by which most records have as many fields as the header, and whether spaces follow it.

    `csv.Sniffer` counts signs line by line: of two columns of sentences it takes the comma within them.
    """

    def likeness(dialect: dict[str, Any]) -> tuple[float, int, bool, bool]:
        records: list[list[str]] = []
        try:
            reader = csv.reader(io.StringIO(text, newline=""), strict=True, **dialect)
            records += islice((fields for fields in reader if fields), LOOKED_AT)
        except csv.Error:  # of the last record where the sample is cut
            records += [[]] * (bool(records) and len(sample) < SAMPLED)
        if not records or len(records[0]) < 2:
            return 0, 0, True, True
        like = [len(fields) == len(records[0]) and not any(map(STRAY.fullmatch, fields)) for fields in records]
        is_prose = any(name.startswith(" ") for name in records[0][1:])
        return sum(like) / len(like), len(records[0]), not is_prose, not dialect["skipinitialspace"]

    text = sample.decode("utf-8", "replace")
    signs = (separator,) if separator else SEPARATORS
    ways = [{"delimiter": sign, "skipinitialspace": spaced} for spaced in (False, True) for sign in signs]
    return max(ways, key=likeness)


def _remedy(sample: bytes) -> str:
    import charset_normalizer

    # Few bytes beyond ASCII tell an alphabet and no more: the encoding of Excel in most of Europe is as good a guess.
    is_latin = sum(byte >= 0x80 for byte in sample) < len(sample) / 4
    best = None if is_latin else charset_normalizer.from_bytes(sample).best()
    encoding = best.encoding if best else "cp1252"
    word = HIGH.search(sample)
    read = f" (it reads {word[0].decode(encoding, 'replace')!r} then)" if word else ""
    return f"save it as UTF-8, or set data.csv.encoding, maybe to {encoding}{read}"


def _header(reader: Iterator[list[str]]) -> tuple[list[str], str | None]:
    """Returns the names of the columns, and the problem with them."""
    try:
        names = [name.strip() for name in next(reader)]
    except csv.Error as error:
        return [], str(error)
    twice = next((name for name in names if name and names.count(name) > 1), None)
    return names, None if twice is None else f"more than one column is called {twice!r}; rename one"


def _row(
    file: str, record: _Record, reader: Iterator[list[str]], names: list[str], separator: str, remedy: Callable[[], str]
) -> list[SourceRow | UnusableRow] | None:
    """Returns the rows of the next record, None at the end."""
    try:
        fields = next(reader)
    except StopIteration:
        return None
    except csv.Error as error:
        doubled = any(b'\\"' in line.data for line in record.taken)
        more = """; write a quote within quotes twice ("") and not as \\\"""" if doubled else ""
        return list(record.rejected(file, f"broken CSV: {error}{more}"))
    if not any(field.strip(NOTHING) for field in fields):
        return []
    number = record.taken[-1].number
    raw = as_read(b"".join(line.data for line in record.taken))
    if any(field.strip(NOTHING) for field in fields[len(names) :]):
        advice = f"put texts that hold {separator!r} in quotes, or set data.csv.delimiter"
        return [UnusableRow(file, number, f"more fields than the header has; {advice}", raw)]
    if any(map(ESCAPED.search, fields)):
        return [UnusableRow(file, number, f"not UTF-8; {remedy()}", raw)]
    values: dict[str, object] = dict.fromkeys(filter(None, names))
    for at, (name, field) in enumerate(zip(names, fields, strict=False)):
        if name or field:
            values[name or f"Unnamed: {at}"] = field  # as pandas calls it
    return [SourceRow(file, number, values)]


def read_plain_text(file: str, lines: Iterator[Line], sample_by: str) -> Iterator[SourceRow | UnusableRow]:
    """Reads plain text; `sample_by` is a row: `line`, `paragraph` or `document`."""
    block: list[Line] = []
    size = 0
    try:
        for line in lines:
            blank = not line.data.strip()
            if sample_by == "line":
                if not blank:
                    yield _text(file, [line], line.data.rstrip(b"\r\n"))
            elif sample_by == "paragraph" and blank:
                if block:
                    yield _text(file, block)
                block, size = [], 0
            elif size <= MAX_ROW:
                block.append(line)
                size += len(line.data)
    except UnreadableError as error:
        number = block[0].number if block else error.line
        raise UnreadableError(error.reason, number, b"".join(line.data for line in block) + error.raw) from None
    if any(line.data.strip() for line in block):
        yield _text(file, block)


def _text(file: str, block: list[Line], data: bytes | None = None) -> SourceRow | UnusableRow:
    whole = b"".join(line.data for line in block) if data is None else data
    too_long = len(whole) > MAX_ROW or any(line.too_long for line in block)
    shown = whole[:SHOWN] if too_long else whole
    text = decode_line(file, Line(block[0].number, shown, too_long), shown)
    return text if isinstance(text, UnusableRow) else SourceRow(file, block[0].number, {"text": text})


HELD = 2**31  # bytes for a part of a table, unpacked, and its rows: a page of Parquet or a batch of Arrow
_DATA = re.compile(rb"VmData:\s+(\d+) kB")


@contextlib.contextmanager
def bounded(most: int) -> Iterator[None]:
    """Limits the memory that the block adds, in any thread of the process; a `MemoryError` beyond it. On Linux.

    The system knows no bound of a thread, and Arrow's pools have none. Nothing else of Baton's runs during the reading
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


def read_parquet(file: sources.SourceFile) -> Iterator[SourceRow | UnusableRow]:
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
                raise ValueError(f"it holds {count} rows, and its header has {table.metadata.num_rows}")

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


def read_arrow(file: sources.SourceFile) -> Iterator[SourceRow | UnusableRow]:
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
def _opened(file: sources.SourceFile, **options: Any) -> Iterator[Any]:
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
        if sum(map(_column_bytes, batch.columns)) <= MAX_ROW:
            rows = _within_bounds(batch.to_pylist)
        elif batch.num_rows == 1:
            raw = _columns_beginning(batch)
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


def _column_bytes(column: Any) -> int:
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
        return 8 * len(column) + _column_bytes(column.flatten())
    if types.is_struct(kind):
        return sum(map(_column_bytes, column.flatten()))
    return int(column.nbytes)


def _columns_beginning(batch: Any) -> str:
    import pyarrow

    parts = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = column[0].value if isinstance(column[0], pyarrow.DictionaryScalar) else column[0]
        data = value.as_buffer() if isinstance(value, pyarrow.BinaryScalar) else None
        parts.append(f"{name}: ".encode() + (bytes(data.slice(0, min(SHOWN, data.size))) if data else b"\xe2\x80\xa6"))
    return as_read(b", ".join(parts)[:SHOWN])


SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
MAX_DOC = 400  # longest docstring taken, in characters: one paragraph


def stdlib_rows() -> Iterator[dict[str, str]]:
    """Yields `{"prompt": signature, "completion": first paragraph of the docstring}`, files in name order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(file.relative_to(root).parts):
            yield from _documented(file)


def _documented(file: Path) -> Iterator[dict[str, str]]:
    try:
        tree = ast.parse(file.read_bytes())  # never imported
    except (SyntaxError, ValueError):
        return
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
            paragraph = " ".join(doc.split("\n\n", 1)[0].split())
            if 20 <= len(paragraph) <= MAX_DOC and paragraph.isascii():
                yield {"prompt": f"def {node.name}({ast.unparse(node.args)}):", "completion": paragraph}


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes of `ast.walk` in its order, without expressions: no function is defined in one."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        todo.extend(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        )
        yield node


NAMED = {".ndjson": "jsonl", ".feather": "arrow", **dict.fromkeys(sources.TEXTS, "text")}
"""Types not named after their suffix."""
RETURNS = re.compile(rb'(?:[^"\r\n]++|"[^"]*+")*+\r(?!\n)')
"""Header of a table whose records end in carriage returns alone."""
AS_IT_IS = Csv()


def read(
    source: str, sample_by: str, seen: Callable[[str], None] = lambda kind: None, csv: Csv = AS_IT_IS
) -> Iterator[SourceRow | UnusableRow]:
    """Yields every row of a source in a stable order.

    `sample_by` is a text file's row: `line`, `paragraph` or `document`. `seen` is called with the type of each file:
    `jsonl`, `json`, `csv`, `tsv`, `parquet`, `arrow`, `text`; or with `builtin` or `hub`.

    Raises:
        UserError: the source does not exist or has a type that is not supported.
    """
    if source == sources.BUILTIN:
        seen("builtin")
        yield from (SourceRow(source, number, dict(row)) for number, row in enumerate(stdlib_rows(), 1))
    elif sources.is_dataset_id(source):
        seen("hub")
        yield from _dataset(source)
    else:
        for file in sources.files([source]):
            yield from _file(file, sample_by, seen, csv)


def kind_of(file: sources.SourceFile, head: bytes) -> str:
    """Returns a file's type by its unpacked beginning, else by its name; raises UserError where neither tells."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    text = next(text_blocks([head]), b"")
    if file.suffix in (".json", ".jsonl", ".ndjson"):
        return _json_kind(text, file.suffix)
    if file.suffix in sources.SUFFIXES:
        return NAMED.get(file.suffix, file.suffix[1:])
    if text.lstrip()[:1] in (b"{", b"["):
        return _json_kind(text, ".json")
    raise UserError(
        f"data.source: {file.uri} has type {file.suffix!r}, and its content is of no known one.",
        remedy=f"Supported: {', '.join(sources.SUFFIXES)}, each also followed by {', '.join(sources.COMPRESSED)}.",
    )


def _json_kind(text: bytes, suffix: str) -> str:
    """Tells lines of JSON from an array, and from objects that are spread over lines."""
    first, _, rest = text.strip().partition(b"\n")
    if re.match(rb"\s*\[\s*{", text):
        return "jsonl" if suffix != ".json" and rest and _is_value(first) else "json"
    whole_lines = (line for line in islice(text.lstrip().split(b"\n"), LOOKED_AT) if line.startswith(b"{"))
    if suffix != ".json" or len(first) >= BLOCK // 2 or any(map(_is_value, whole_lines)):
        return "jsonl"
    return "json"


def _is_value(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _file(
    file: sources.SourceFile, sample_by: str, seen: Callable[[str], None], csv: Csv
) -> Iterator[SourceRow | UnusableRow]:
    try:
        stream = blocks(file)
        head = next(stream, b"")
        kind = kind_of(file, head)
        seen(kind)
        if kind in ("parquet", "arrow"):
            stream.close()
            yield from read_parquet(file) if kind == "parquet" else read_arrow(file)
            return
        is_table = kind in ("csv", "tsv")
        text = text_blocks(chain([head], stream), csv.encoding if is_table else None)
        sample = next(text, b"")
        ends_in_return = RETURNS.match(sample) if is_table else b"\r" in sample and b"\n" not in sample
        text, end = chain([sample], text), b"\r" if ends_in_return else b"\n"
        match kind:
            case "jsonl":
                yield from read_jsonl(file.uri, lines(text, end))
            case "json":
                yield from _json_values(file.uri, text)
            case "csv" | "tsv":
                separator = csv.delimiter or ("\t" if kind == "tsv" else None)
                yield from read_delimited(file.uri, lines(text, end), sample, separator)
            case _:
                if marked_encoding(head) and b"\t" in sample.partition(end)[0]:
                    raise UnreadableError("a table of text in UTF-16; give its name the ending .tsv", raw=head[:SHOWN])
                yield from read_plain_text(file.uri, lines(text, end), sample_by)
    except UnreadableError as error:
        yield UnusableRow(file.uri, error.line, error.reason, as_read(error.raw), rest=True)


def _dataset(source: str) -> Iterator[SourceRow | UnusableRow]:
    """Reads a hub dataset: `hf://datasets/org/name[@revision][?config=…&split=…]`."""
    import datasets

    address, _, query = source.removeprefix("hf://datasets/").partition("?")
    name, _, revision = address.rstrip("/").partition("@")
    options = {key: values[0] for key, values in parse_qs(query).items()}
    try:
        rows = datasets.load_dataset(
            name, options.get("config"), split=options.get("split", "train"), revision=revision or None, streaming=True
        )
        for number, values in enumerate(rows, 1):
            if _num_bytes(values) <= MAX_ROW:
                yield SourceRow(source, number, dict(values))
            else:
                yield UnusableRow(source, number, TOO_LONG, as_read(_beginning(values)))
    except Exception as error:
        raise UserError(
            f"data.source {source!r} cannot be read from the hub: {type(error).__name__}: {error}",
            remedy="Check the name, config and split, and that the hub can be reached.",
        ) from None


def _num_bytes(values: object) -> int:
    if isinstance(values, str):
        return len(values) if values.isascii() else len(values.encode("utf-8", "surrogatepass"))
    if isinstance(values, bytes):
        return len(values)
    if isinstance(values, dict):
        return sum(_num_bytes(key) + _num_bytes(value) for key, value in values.items())
    return sum(map(_num_bytes, values)) if isinstance(values, list | tuple) else 8


def _beginning(values: dict[str, object]) -> bytes:
    texts = {name: value[:SHOWN] if isinstance(value, str) else "…" for name, value in values.items()}
    return ", ".join(f"{name}: {text}" for name, text in texts.items()).encode("utf-8", "backslashreplace")[:SHOWN]


SPACE = re.compile(r"[ \t\r\n]*")
LONGEST_TOKEN = 16
"""Characters from the end within which an error may come from a literal or an escape that is cut there."""


def _json_values(file: str, stream: Iterable[bytes]) -> Iterator[SourceRow | UnusableRow]:
    """Reads the objects of an array, or consecutive ones; a row's number is its place, from 1.

    A broken value is rejected alone where its brackets tell where it ends.
    """
    text = _JsonText(stream)
    in_array = text.peek() == "["
    text.at += in_array
    number = 1
    try:
        while (sign := text.peek()) and not (in_array and sign == "]"):
            yield text.value(file, number, in_array)
            number += 1
            sign = text.peek()
            if in_array and sign == ",":
                text.at += 1
            elif in_array and sign and sign != "]":
                raise text.damaged("broken JSON: expected , or ]")
        if in_array and not sign:
            raise text.damaged("broken JSON: the array does not end")
        text.at += in_array
        if text.peek() or text.broken_off:
            raise text.damaged("broken JSON: text after the array")
    except UnreadableError as error:
        raise UnreadableError(error.reason, number, error.raw or text.rest()) from None


class _JsonText:
    """A window on a text, which moves on as values are taken."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = iter(stream)
        # Bytes that are not UTF-8 travel as surrogates, so that only their value is lost.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self.at = 0
        self._ended = False
        self._error: UnreadableError | None = None

    def more(self) -> bool:
        """Doubles the window at least, so that a long value is searched few times; tells whether there was more."""
        wanted = max(len(self._text) - self.at, BLOCK)
        blocks = [self._text[self.at :]]
        while wanted > 0 and not self._ended:
            try:
                block = next(self._stream, b"")
            except UnreadableError as error:  # the text before it is read first
                self._error, block = error, b""
            self._ended = not block
            blocks.append(self._decoder.decode(block, final=self._ended))
            wanted -= len(blocks[-1])
        before = len(blocks[0])
        self._text, self.at = "".join(blocks), 0
        return len(self._text) > before

    def peek(self) -> str:
        """Moves over white space and returns the next character, none at the end."""
        while True:
            self.at = SPACE.match(self._text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self.at < len(self._text) or not self.more():
                return self._text[self.at : self.at + 1]

    def value(self, file: str, number: int, in_array: bool) -> SourceRow | UnusableRow:
        while True:
            try:
                rows.require_few_signs(self._text, self.at)
                value, end = rows.row_value(lambda decoder: decoder.raw_decode(self._text, self.at))
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - LONGEST_TOKEN
                if cut and self._may_grow() and self.more():
                    continue
                return self._broken(file, number, f"broken JSON: {error.msg}", in_array)
            except (ValueError, RecursionError) as error:  # a number of too many digits, too deep or too many
                return self._broken(file, number, f"broken JSON: {error}", in_array)
            if end == len(self._text) and self._may_grow() and self.more():
                continue  # a number may continue
            raw, self.at = self._text[self.at : end], end
            if len(raw) > MAX_ROW:
                return UnusableRow(file, number, TOO_LONG, _as_read(raw[:SHOWN]))
            if ESCAPED.search(raw):
                return UnusableRow(file, number, "not UTF-8", _as_read(raw))
            return as_row(file, number, value, raw)

    def _broken(self, file: str, number: int, reason: str, in_array: bool) -> UnusableRow:
        """Takes an unreadable value, up to where its brackets close, or raises UnreadableError."""
        while (end := self._end(in_array)) is None:
            if not self._may_grow() or not self.more():
                raise self.damaged(reason if self._may_grow() else f"broken JSON: {TOO_LONG}")
        raw, self.at = self._text[self.at : end], end
        return UnusableRow(file, number, reason, _as_read(raw))

    def _end(self, in_array: bool) -> int | None:
        depth = 0
        for token in rows.TOKEN.finditer(self._text, self.at):
            sign = token[0]
            depth += (sign in "[{") - (sign in "]}")
            if in_array and (depth < 0 or (depth == 0 and sign == ",")):
                return token.start()
            if not in_array and depth <= 0 and sign in "]}":
                return token.end()
        return None

    def _may_grow(self) -> bool:
        return len(self._text) - self.at <= MAX_ROW

    @property
    def broken_off(self) -> bool:
        return self._error is not None

    def rest(self) -> bytes:
        return self._text[self.at : self.at + SHOWN].encode("utf-8", "surrogateescape")

    def damaged(self, reason: str) -> UnreadableError:
        """Returns the error of a text in which nothing more can be told apart."""
        return UnreadableError(self._error.reason if self._error else reason, raw=self.rest())


def _as_read(text: str) -> str:
    return as_read(text.encode("utf-8", "surrogateescape"))
