"""Rows, rejected rows, and records: rows to be written, with their source, on disk if they are many."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from baton.errors import BatonError

SIDES = ("train", "eval", "test")
MAX_ROW = 2**26  # longest row in bytes, 64 MiB: bounds the memory for reading

TOO_LONG = f"longer than {MAX_ROW >> 20} MiB"
T = TypeVar("T")
DIGITS = 4000  # longest number in digits; Python reads 4,300
SHOWN = 1000  # bytes kept of longer rows
MAX_SIGNS = 1_000_000  # brackets and commas of a row's JSON: `[]` takes 25 times as many bytes in Python as in a file
TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)
"""Tokens that decide where a JSON value ends. A string without an end goes to the text's end, in one pass."""


@dataclass(frozen=True)
class UnusableRow:
    """A row that could not be used."""

    file: str
    line: int  # line or row number, from 1
    reason: str
    raw: str  # bytes that are not UTF-8 escaped
    # Whether it covers everything from there on: the file breaks off, with an unknown number of rows missing.
    rest: bool = False


@dataclass(frozen=True)
class SourceRow:
    """A row as found, with its place."""

    file: str
    line: int
    values: dict[str, object]


class UnreadableError(BatonError):
    """Nothing more can be read from a file after a line; `raw` is its part read so far."""

    def __init__(self, reason: str, line: int = 1, raw: bytes = b"") -> None:
        super().__init__(reason)
        self.reason, self.line, self.raw = reason, line, raw


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values


def _number(digits: str) -> int | str:
    return int(digits) if len(digits) <= DIGITS else digits


DECODER = json.JSONDecoder(object_pairs_hook=_distinct)
"""Refuses two values under one key, as a decoder would silently take the last."""
_LONG = json.JSONDecoder(object_pairs_hook=_distinct, parse_int=_number)


def loads(text: str, decoder: json.JSONDecoder | None = None) -> Any:
    """Returns untrusted JSON's value, by Python's own decoder or `DECODER`; raises ValueError where it cannot."""
    require_few_signs(text)
    try:
        return row_value(lambda decoder: decoder.decode(text)) if decoder is DECODER else json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def row_value(decode: Callable[[json.JSONDecoder], T]) -> T:
    """Returns a row's value, numbers of more digits than Python takes as text; raises ValueError where broken."""
    try:
        return decode(DECODER)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        return decode(_LONG)


def require_few_signs(text: str, at: int = 0) -> None:
    """Raises ValueError of a JSON value, from a place in a text on, that would take far more memory than its text."""
    if len(text) - at <= MAX_SIGNS:
        return
    signs = depth = 0
    for token in TOKEN.finditer(text, at):
        sign = token[0]
        if sign[0] == '"':
            continue
        signs += 1
        depth += (sign in "[{") - (sign in "]}")
        if signs > MAX_SIGNS:
            raise ValueError(f"more than {MAX_SIGNS:,} brackets and commas")
        if depth <= 0:
            return


def as_read(data: bytes) -> str:
    """Returns bytes as text, those that are not UTF-8 escaped as `\\xNN`."""
    return data.decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Record:
    """A row that can be used."""

    content: str  # the row as JSON, keys sorted: it is written, and decides the side
    file: str
    line: int
    source: int = 0  # index of its source in `data.source`
    side: str = ""  # given by the source; empty where the content decides
    key: str = ""  # value of the column of `data.split.stratify_by` or `group_by`

    @cached_property
    def row(self) -> dict[str, Any]:
        return json.loads(self.content)


def as_content(row: dict[str, object]) -> str:
    """Returns a row as it is written: the same row is the same text.

    Keys of rows and messages are sorted; within tools and calls the order is the source's, for a chat template writes
    them as they come.
    """
    return json.dumps({name: _ordered(row[name]) for name in sorted(row)}, ensure_ascii=False)


def _ordered(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [dict(sorted(each.items())) if isinstance(each, dict) and "role" in each else each for each in value]


class Spool:
    """Records in a file, for several passes: each line has a record's place, a tab, and its content."""

    def __init__(self, records: Iterable[Record], path: str) -> None:
        self._path = path
        self._count = 0
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for record in records:
                place = json.dumps([record.file, record.line, record.source, record.side, record.key])
                file.write(f"{place}\t{record.content}\n")
                self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        with open(self._path, encoding="utf-8", newline="\n") as file:
            for line in file:
                place, _, content = line.partition("\t")
                yield Record(content[:-1], *json.loads(place))


MAX_REASONS = 1000  # reasons counted; one may quote its row, so that each row has its own


class RejectedRows:
    """Rejected rows in a file, one `UnusableRow` as JSON a line."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.count = 0
        self.first: UnusableRow | None = None
        self.broken_off: UnusableRow | None = None  # the first that covers the rest of its file
        self.reasons: dict[str, tuple[int, UnusableRow]] = {}  # reason → its rows, and the first of them
        self._file = open(path, "w", encoding="ascii")  # noqa: SIM115 - closed by `close`

    def add(self, row: UnusableRow) -> None:
        self._file.write(json.dumps(asdict(row)) + "\n")
        self.count += 1
        row = replace(row, reason=row.reason[:SHOWN], raw=row.raw[:SHOWN])  # those that are held in memory
        self.first = self.first or row
        if row.rest:
            self.broken_off = self.broken_off or row
        if row.reason in self.reasons or len(self.reasons) < MAX_REASONS:
            count, first = self.reasons.get(row.reason, (0, row))
            self.reasons[row.reason] = count + 1, first

    def close(self) -> None:
        self._file.close()
