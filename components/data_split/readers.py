"""Reading rows from files of every supported type; what cannot be read comes out as a `Rejected`."""

from __future__ import annotations

import csv
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from components.data_split import stdlib_docs
from components.shared import sources
from components.shared.errors import UserError
from components.shared.sources import SourceFile

csv.field_size_limit(2**27)


@dataclass(frozen=True)
class Rejected:
    """A row that could not be used.

    Attributes:
        file: Address of its file.
        line: Line or row number, from 1.
        reason: Why.
        raw: The row as read, bytes that are not UTF-8 escaped as `\\xNN`.
    """

    file: str
    line: int
    reason: str
    raw: str


@dataclass(frozen=True)
class Row:
    """A row as found, with where it stood."""

    file: str
    line: int
    values: dict[str, Any]


def read(source_list: list[str], sample_by: str) -> Iterator[Row | Rejected]:
    """Yields every row of all sources in a stable order.

    Args:
        source_list: As in `data.source`.
        sample_by: What one row of a text file is: `line`, `paragraph` or `document`.

    Raises:
        UserError: a source does not exist or has a type that is not supported.
    """
    for source in source_list:
        if source == sources.BUILTIN:
            yield from (Row(source, number, dict(row)) for number, row in enumerate(stdlib_docs.rows(), 1))
        elif sources.is_dataset_id(source):
            yield from _dataset(source)
        else:
            for file in sources.files([source]):
                yield from _file(file, sample_by)


def _file(file: SourceFile, sample_by: str) -> Iterator[Row | Rejected]:
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if file.suffix in (".txt", ".text", ".md"):
        return _text(file, sample_by)
    if file.suffix not in readers:
        raise UserError(
            f"data.source: {file.uri} has type {file.suffix!r}.",
            remedy=f"Supported: {', '.join(sources.SUFFIXES)}.",
        )
    return readers[file.suffix](file)


def _lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    with (
        file.storage.translated(),
        file.storage.fs.open(file.storage.key(file.path), "rb", compression="infer") as f,
    ):
        try:
            for number, line in enumerate(io.BufferedReader(f), 1):
                yield number, (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if not file.path.lower().endswith(sources.COMPRESSED) or getattr(error, "errno", None):
                raise
            raise UserError(
                f"data.source: {file.uri} cannot be decompressed: {error}.", remedy="Write the file again."
            ) from None


def _decode(file: SourceFile, number: int, data: bytes) -> str | Rejected:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Rejected(file.uri, number, f"not UTF-8 at byte {error.start}", data.decode("utf-8", "backslashreplace"))


def _jsonl(file: SourceFile) -> Iterator[Row | Rejected]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        text = _decode(file, number, line.rstrip(b"\r\n"))
        yield text if isinstance(text, Rejected) else _object(file, number, text)


def _object(file: SourceFile, number: int, text: str) -> Row | Rejected:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        return Rejected(file.uri, number, f"broken JSON: {error}", text)
    if not isinstance(value, dict):
        return Rejected(file.uri, number, f"a JSON {type(value).__name__}, expected an object", text)
    return Row(file.uri, number, value)


def _json(file: SourceFile) -> Iterator[Row | Rejected]:
    text = _decode(file, 1, b"".join(line for _, line in _lines(file)))
    if isinstance(text, Rejected):
        yield text
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield Rejected(file.uri, 1, f"broken JSON: {error}", text)
        return
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        if isinstance(item, dict):
            yield Row(file.uri, number, item)
        else:
            yield Rejected(file.uri, number, f"a JSON {type(item).__name__}, expected an object", json.dumps(item))


def _csv(file: SourceFile) -> Iterator[Row | Rejected]:
    """Bytes that are not UTF-8 travel as surrogates through the parser, so that only their row is lost.

    A quote that is never closed takes all lines behind it along: each of them counts as rejected.
    """
    taken: list[tuple[int, str]] = []

    def text_lines() -> Iterator[str]:
        for number, line in _lines(file):
            taken.append((number, line.decode("utf-8", "surrogateescape")))
            yield taken[-1][1]

    lines = text_lines()
    reader = csv.DictReader(lines, strict=True)
    try:
        _ = reader.fieldnames
    except csv.Error as error:
        for _ in lines:  # without a header no line can be read
            pass
        yield from (Rejected(file.uri, number, f"broken CSV header: {error}", line) for number, line in taken)
        return
    while True:
        taken.clear()
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            for number, line in taken:
                yield Rejected(file.uri, number, f"broken CSV: {error}", line)
            continue
        raw = json.dumps(values, ensure_ascii=True, default=str)
        if None in values:
            yield Rejected(file.uri, reader.line_num, "more fields than the header has", raw)
        elif any("\udc80" <= character <= "\udcff" for value in values.values() for character in value or ""):
            yield Rejected(file.uri, reader.line_num, "not UTF-8", raw)
        else:
            yield Row(file.uri, reader.line_num, dict(values))


def _parquet(file: SourceFile) -> Iterator[Row | Rejected]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with file.storage.fs.open(file.storage.key(file.path), "rb") as opened:
            for batch in pyarrow.parquet.ParquetFile(opened).iter_batches(1000):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(file.uri, number, values)
    except (pyarrow.ArrowException, OSError) as error:
        yield Rejected(file.uri, number + 1, f"broken Parquet: {error}", "")


def _text(file: SourceFile, sample_by: str) -> Iterator[Row | Rejected]:
    start, block = 1, b""
    for number, line in _lines(file):
        blank = not line.strip()
        if sample_by == "document" or (sample_by == "paragraph" and not blank):
            start, block = (start, block + line) if block else (number, line)
        elif sample_by == "line" and not blank:
            yield _text_row(file, number, line.rstrip(b"\r\n"))
        elif block:
            yield _text_row(file, start, block)
            block = b""
    if block.strip():
        yield _text_row(file, start, block)


def _text_row(file: SourceFile, number: int, data: bytes) -> Row | Rejected:
    text = _decode(file, number, data)
    return text if isinstance(text, Rejected) else Row(file.uri, number, {"text": text})


def _dataset(source: str) -> Iterator[Row]:
    """Reads a hub dataset: `hf://datasets/org/name[@revision][?config=…&split=…]`."""
    import datasets

    address, _, query = source.removeprefix("hf://datasets/").partition("?")
    name, _, revision = address.rstrip("/").partition("@")
    options = {key: values[0] for key, values in parse_qs(query).items()}
    try:
        rows = datasets.load_dataset(
            name,
            options.get("config"),
            split=options.get("split", "train"),
            revision=revision or None,
            streaming=True,
        )
        for number, values in enumerate(rows, 1):
            yield Row(source, number, dict(values))
    except Exception as error:
        raise UserError(
            f"data.source {source!r} cannot be read from the hub: {type(error).__name__}: {error}",
            remedy="Check the name, config and split, and that the hub can be reached.",
        ) from None
