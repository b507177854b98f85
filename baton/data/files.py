"""Files as streams: unpacked and decoded on the way, and read line by line as JSON lines, CSV or text.

Memory does not grow with the file.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import functools
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from baton.data.rows import DECODER, MAX_ROW, SHOWN, TOO_LONG, SourceRow, UnreadableError, UnusableRow, as_read, loads
from baton.store.sources import SourceFile

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


def blocks(file: SourceFile) -> Generator[bytes, None, None]:
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
"""Records that tell how a CSV is written, and bytes of them; a block of a packed file may have many times as many."""
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
            value = loads(text, DECODER)
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
