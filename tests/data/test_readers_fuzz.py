"""Readers under fire: whatever the bytes are, no crash, no row lost without a word, and memory within bounds."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.data import readers, rows
from baton.data.rows import SourceRow, UnusableRow

PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def read(name: str, content: bytes, sample_by: str = "line") -> list[SourceRow | UnusableRow]:
    """Read a file of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_bytes(content)
        return list(readers.read(f"{folder}/{name}", sample_by))


BITS = (
    *(b'{"a": 1}', b'{"a": "x"}', b"[", b"]", b",", b"{", b"}", b'"', b"\\", b"\n", b"\r\n", b"\r", b"\0", b" "),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\xff", b'{"a": "\\ud800"}', b"\xed\xa0\x80", b"[[[[", b"1e999", b"NaN"),
    *(b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff\x10\0\0\0", b"\x1f\x8b\x08", b"BZh9", b"\x28\xb5\x2f\xfd"),
)
"""What means something in some type of file."""
PIECES = st.lists(st.one_of(st.binary(max_size=12), st.sampled_from(BITS)), max_size=12).map(b"".join)
SUFFIXES = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "txt")


@settings(max_examples=150)
@given(
    content=PIECES,
    suffix=st.sampled_from(SUFFIXES),
    packed=st.sampled_from(sorted(PACKED)),
    pack=st.booleans(),
    sample_by=st.sampled_from(["line", "paragraph", "document"]),
)
def test_any_bytes(content: bytes, suffix: str, packed: str, pack: bool, sample_by: str) -> None:
    for found in read(f"rows.{suffix}{packed}", PACKED[packed](content) if pack else content, sample_by):
        assert found.line >= 1
        if isinstance(found, UnusableRow):
            assert found.reason
            json.dumps([found.reason, found.raw])


LINES = st.lists(
    st.sampled_from([b'{"a": 1}', b'{"a": ', b"[]", b"\xff", b"", b" ", b'{"a": "\\u0000"}', b"\0", b"x" * 40])
)


@given(lines=LINES, end=st.sampled_from([b"\n", b"\r\n"]), last=st.booleans(), block=st.integers(1, 30))
def test_each_line_is_a_row_or_rejected(lines: list[bytes], end: bytes, last: bool, block: int) -> None:
    """Wherever the blocks in which a file is read may end."""
    content = end.join(lines) + (end if last else b"")
    whole = [content[at : at + block] for at in range(0, len(content), block)]

    found = [(line.number, line.data.rstrip(b"\r\n")) for line in readers.lines(whole)]

    assert [pair for pair in found if pair[1]] == [(at, line) for at, line in enumerate(lines, 1) if line]
    numbers = [row.line for row in read("rows.jsonl", content)]
    assert numbers == [at for at, line in enumerate(lines, 1) if line.strip()]


VALUES = st.lists(
    st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.recursive(
            st.none() | st.integers() | st.text('[]{},"\\é\u2028', max_size=6),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("c"), inner),
        ),
        max_size=2,
    ),
    max_size=6,
)


@given(
    values=VALUES, indent=st.sampled_from([None, 1]), broken=st.integers(0, 5), text=st.sampled_from(["", "[7", "}"])
)
@example(values=[{}, {}], indent=None, broken=0, text="")
def test_each_value_of_an_array_is_a_row_or_rejected(
    values: list[Any], indent: int | None, broken: int, text: str
) -> None:
    """And what is broken costs no other, as long as its brackets tell where it ends."""
    whole = [json.dumps(value, indent=indent, ensure_ascii=False) for value in values]
    if text and broken < len(values):
        whole[broken] = '{"a": [tru], "b": "}"}'
    found = read("rows.json", f"[{', '.join(whole)}]".encode())

    assert [row.line for row in found] == list(range(1, len(values) + 1))
    for position, (row, value) in enumerate(zip(found, values, strict=True)):
        if text and position == broken:
            assert isinstance(row, UnusableRow)
            assert (row.reason, row.raw) == ("broken JSON: Expecting value", whole[broken])
        else:
            assert isinstance(row, SourceRow)
            assert row.values == value


def table(kind: str) -> bytes:
    """A table of a hundred rows as a file."""
    made = pyarrow.Table.from_pylist([{"a": f"row {number}", "b": [{"c": number}]} for number in range(100)])
    sink = io.BytesIO()
    if kind == "parquet":
        pyarrow.parquet.write_table(made, sink, row_group_size=25)
    else:
        with pyarrow.ipc.new_file(sink, made.schema) as opened:
            opened.write_table(made, max_chunksize=25)
    return sink.getvalue()


TABLES = {kind: table(kind) for kind in ("parquet", "arrow")}


@settings(max_examples=100)
@given(
    kind=st.sampled_from(sorted(TABLES)),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4)), max_size=3),
    cut=st.floats(0, 1),
)
def test_a_damaged_table(kind: str, flips: list[tuple[float, bytes]], cut: float) -> None:
    content = bytearray(TABLES[kind])
    for where, data in flips:
        at = int(where * len(content))
        content[at : at + len(data)] = data
    found = read(f"rows.{kind}", bytes(content[: int(cut * len(content))]) if cut < 0.5 else bytes(content))

    numbers = [row.line for row in found]
    assert numbers == list(range(1, len(numbers) + 1))
    if len(numbers) < 100:
        assert cut < 0.5 or flips
        assert isinstance(found[-1], UnusableRow)


DEEP = b"[" * 200_000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_that_is_too_deep(name: str) -> None:
    good = b'{"a": 1}'
    content = (
        b'{"a": ' + DEEP + b"\n" + good
        if name == "rows.jsonl"
        else b'[{"a": ' + DEEP + DEEP.replace(b"[", b"]") + b"}, " + good + b"]"
    )

    first, second = read(name, content)

    assert isinstance(first, UnusableRow)
    assert first.reason.startswith("broken JSON: maximum recursion depth exceeded")
    assert second == SourceRow(second.file, 2, {"a": 1})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows.json"])
def test_a_row_that_is_longer_than_rows_may_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK", 1000)
    monkeypatch.setattr(readers, "MAX_ROW", 5000)
    long = b"x" * 20_000
    content, line = {
        "rows.jsonl": (b'{"a": "y"}\n{"a": "' + long + b'"}\n{"a": "z"}\n', 2),
        "rows.csv": (b"a\ny\n" + long + b"\nz\n", 3),
        "rows.txt": (b"y\n" + long + b"\nz\n", 2),
        "rows.json": (b'[{"a": "y"}, {"a": "' + long + b'"}, {"a": "z"}]', 2),
    }[name]

    before, found, *behind = read(name, content)

    assert isinstance(before, SourceRow)
    assert isinstance(found, UnusableRow)
    assert found.line == line
    assert "longer than " in found.reason
    assert len(found.raw) <= rows.SHOWN
    if name == "rows.json":
        assert (behind, found.rest) == ([], True)
    else:
        assert [row.values for row in behind if isinstance(row, SourceRow)] == [
            {"text" if name == "rows.txt" else "a": "z"}
        ]


MEASURE = """
import re, sys
from baton.data import readers
from baton.data.rows import SourceRow
def peak():
    return int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before = peak()
count = sum(isinstance(row, SourceRow) for row in readers.read(sys.argv[1], sys.argv[2]))
print(count, peak() - before)
"""


def measured(path: Path, sample_by: str = "line") -> tuple[int, int]:
    """Rows of a file, and MiB of memory that reading it took at the peak."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), sample_by], capture_output=True, text=True, check=True
    )
    count, peak = done.stdout.split()
    return int(count), int(peak)


def big(path: Path, kind: str) -> None:
    """Write about 100 MB."""
    row = b'{"a": "' + b"x" * 990 + b'"}'
    with path.open("wb") as file:
        match kind:
            case "array":
                file.write(b"[" + row)
                for _ in range(100):
                    file.write((b", " + row) * 1000)
                file.write(b"]")
            case "line":
                file.write(b'{"a": 1}\n{"a": "')
                for _ in range(100):
                    file.write(b"x" * 1_000_000)
                file.write(b'"}\n{"a": 2}\n')
            case "quote":
                file.write(b'a,b\n1,"')
                for _ in range(4):
                    file.write(b"2,3\n" * 100_000)
            case "group":
                column = pyarrow.array([os.urandom(500).hex() for _ in range(100_000)])
                pyarrow.parquet.write_table(pyarrow.table({"a": column}), file, row_group_size=100_000)
            case "document":
                for _ in range(100):
                    file.write(b"x" * 999_999 + b"\n")


BIG = {
    "an array": ("rows.json", "array", "line", 100_001, 60),
    "a line": ("rows.jsonl", "line", "line", 2, 200),
    "a quote that is not closed": ("rows.csv", "quote", "line", 299_999, 100),
    "a row group": ("rows.parquet", "group", "line", 100_000, 120),
    "a document": ("rows.txt", "document", "document", 0, 200),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "sample_by", "count", "limit"), BIG.values(), ids=BIG)
def test_memory(name: str, kind: str, sample_by: str, count: int, limit: int, tmp_path: Path) -> None:
    big(tmp_path / name, kind)

    found, peak = measured(tmp_path / name, sample_by)

    assert found == count
    assert peak < limit
