"""Files that are read line by line: JSON lines, CSV and plain text."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from baton.components.data_split.reading.streams import Line
from baton.components.data_split.rows import MAX_ROW, SHOWN, TOO_LONG, Rejected, Row, UnreadableError, as_read, loads

csv.field_size_limit(MAX_ROW)

MAX_LINES = 100_000
"""Lines of the longest CSV record: a quote that is not closed takes no more along."""
SEPARATORS = (",", "\t", ";", "|")
"""What may stand between the fields of a CSV; the first that its header has."""

_ESCAPED = re.compile("[\udc80-\udcff]")


def decode(file: str, line: Line, data: bytes) -> str | Rejected:
    """Returns bytes of a line as text, or why they are none."""
    if line.too_long:
        return Rejected(file, line.number, TOO_LONG, as_read(data))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Rejected(file, line.number, f"not UTF-8 at byte {error.start}", as_read(data))


def jsonl(file: str, lines: Iterator[Line]) -> Iterator[Row | Rejected]:
    """Reads an object from each line that is not blank."""
    for line in lines:
        if not line.data.strip():
            continue
        text = decode(file, line, line.data.rstrip(b"\r\n"))
        yield text if isinstance(text, Rejected) else _object(file, line.number, text)


def _object(file: str, number: int, text: str) -> Row | Rejected:
    try:
        value = loads(text)
    except ValueError as error:  # also a number of too many digits
        return Rejected(file, number, f"broken JSON: {error}", text)
    return as_row(file, number, value, text)


def as_row(file: str, number: int, value: Any, raw: str) -> Row | Rejected:
    """Returns a JSON value as a row, which it is if it is an object."""
    if not isinstance(value, dict):
        return Rejected(file, number, f"a JSON {type(value).__name__}, expected an object", raw)
    return Row(file, number, value)


class _Record:
    """Lines for the CSV parser, with those of the record it is at.

    Bytes that are not UTF-8 travel as surrogates through the parser, so that only their row is lost.
    """

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
        """Begins the next record."""
        self.taken: list[Line] = []
        self._size = 0

    def rejected(self, file: str, reason: str) -> Iterator[Rejected]:
        for line in self.taken:
            if line.data.strip():
                yield Rejected(file, line.number, reason, as_read(line.data))


def delimited(file: str, lines: Iterator[Line], separator: str | None = None) -> Iterator[Row | Rejected]:
    """Reads a CSV with a header.

    A quote that is never closed takes the lines after it along, up to the longest record: each counts as rejected.

    Args:
        file: Its address.
        lines: Its lines.
        separator: Between fields; found in the header when left out.

    Raises:
        UnreadableError: the file breaks off.
    """
    first = next((line for line in lines if line.data.strip()), None)
    if first is None:
        return
    separator = separator or next((sign for sign in SEPARATORS if sign.encode() in first.data), ",")
    record = _Record(chain([first], lines))
    reader = csv.DictReader(record, strict=True, delimiter=separator)
    try:
        if problem := _header_problem(reader):
            while record.taken:  # without a header no line can be read
                yield from record.rejected(file, f"broken CSV header: {problem}")
                record.taken = list(islice(lines, 1))
            return
        record.begin()
        while (row := _row(file, record, reader)) is not None:
            yield from row
            record.begin()
    except UnreadableError as error:
        number = record.taken[0].number if record.taken else error.line
        raise UnreadableError(error.reason, number, b"".join(line.data for line in record.taken) + error.raw) from None


def _header_problem(reader: csv.DictReader[str]) -> str | None:
    try:
        names = reader.fieldnames or ()
    except csv.Error as error:
        return str(error)
    twice = next((name for name in names if list(names).count(name) > 1), None)
    return None if twice is None else f"more than one column is called {twice!r}"


def _row(file: str, record: _Record, reader: csv.DictReader[str]) -> list[Row | Rejected] | None:
    """Returns what the next record holds, None at the end."""
    try:
        values = next(reader)
    except StopIteration:
        return None
    except csv.Error as error:
        return list(record.rejected(file, f"broken CSV: {error}"))
    number = record.taken[-1].number
    raw = as_read(b"".join(line.data for line in record.taken))
    if None in values:
        return [Rejected(file, number, "more fields than the header has", raw)]
    if any(_ESCAPED.search(value) for value in values.values() if value):
        return [Rejected(file, number, "not UTF-8", raw)]
    return [Row(file, number, dict(values))]


def plain(file: str, lines: Iterator[Line], sample_by: str) -> Iterator[Row | Rejected]:
    """Reads plain text.

    Args:
        file: Its address.
        lines: Its lines.
        sample_by: What one row is: `line`, `paragraph` or `document`.

    Raises:
        UnreadableError: the file breaks off.
    """
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


def _text(file: str, block: list[Line], data: bytes | None = None) -> Row | Rejected:
    whole = b"".join(line.data for line in block) if data is None else data
    too_long = len(whole) > MAX_ROW or any(line.too_long for line in block)
    shown = whole[:SHOWN] if too_long else whole
    text = decode(file, Line(block[0].number, shown, too_long), shown)
    return text if isinstance(text, Rejected) else Row(file, block[0].number, {"text": text})
