"""Readers: every row of every file type, and each that cannot be read with its place and reason."""

import bz2
import gzip
import json
import lzma
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from components.data_split import readers, stdlib_docs
from components.data_split.readers import Rejected, Row
from components.shared.errors import UserError
from components.shared.storage import Storage


def read(name: str, content: bytes, tmp_path: Path, sample_by: str = "line") -> list[tuple[int, Any]]:
    """Write a file and read it: line and values of each row, line and reason of each that is rejected."""
    (tmp_path / name).write_bytes(content)
    found = list(readers.read([str(tmp_path / name)], sample_by))
    assert {row.file for row in found} <= {str(tmp_path / name)}
    return [(row.line, row.values if isinstance(row, Row) else row.reason) for row in found]


JSONL = {
    "ok": (b'{"a": 1}\n{"a": 2}\n', [(1, {"a": 1}), (2, {"a": 2})]),
    "no newline at the end": (b'{"a": 1}', [(1, {"a": 1})]),
    "empty lines": (b'\n{"a": 1}\n  \n\r\n{"a": 2}\n\n', [(2, {"a": 1}), (5, {"a": 2})]),
    "CRLF": (b'{"a": "x"}\r\n{"a": "y"}\r\n', [(1, {"a": "x"}), (2, {"a": "y"})]),
    "BOM": (b'\xef\xbb\xbf{"a": 1}\n', [(1, {"a": 1})]),
    "separators inside": ('{"a": "x\u2028y\x85z"}\n'.encode(), [(1, {"a": "x\u2028y\x85z"})]),
    "escaped NUL": (b'{"a": "x\\u0000y"}\n', [(1, {"a": "x\0y"})]),
    "escaped surrogate": (b'{"a": "\\ud800"}\n', [(1, {"a": "\ud800"})]),
    "broken": (
        b'{"a": 1}\n{"a": \n{"a": 3}\n',
        [(1, {"a": 1}), (2, "broken JSON: Expecting value: line 1 column 7 (char 6)"), (3, {"a": 3})],
    ),
    "raw NUL": (b'{"a": "\0"}\n', [(1, "broken JSON: Invalid control character at: line 1 column 8 (char 7)")]),
    "list": (b'[1]\n{"a": 1}\n', [(1, "a JSON list, expected an object"), (2, {"a": 1})]),
    "text": (b'"x"\n', [(1, "a JSON str, expected an object")]),
    "null": (b"null\n", [(1, "a JSON NoneType, expected an object")]),
    "not UTF-8": (b'{"a": "\xff"}\n{"a": 1}\n', [(1, "not UTF-8 at byte 7"), (2, {"a": 1})]),
    "BOM of UTF-16": ('{"a": 1}'.encode("utf-16"), [(1, "not UTF-8 at byte 0")]),
    "empty": (b"", []),
}


@pytest.mark.parametrize(("content", "expected"), JSONL.values(), ids=JSONL)
def test_jsonl(content: bytes, expected: list[Any], tmp_path: Path):
    assert read("rows.jsonl", content, tmp_path) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [(b"[" * 100_000, "broken JSON: maximum recursion depth"), (b"1" * 5000, "broken JSON: Exceeds the limit (4300")],
    ids=["nesting", "digits"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_that_is_too_much_for_the_parser(name: str, value: bytes, reason: str, tmp_path: Path):
    ((line, found),) = read(name, b'{"a": ' + value + b"}", tmp_path)

    assert line == 1
    assert found.startswith(reason)


def test_a_rejected_row_keeps_what_was_read(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "\xff\xc3\xa9"}\n')

    assert list(readers.read([str(path)], "line")) == [Rejected(str(path), 1, "not UTF-8 at byte 7", '{"a": "\\xffé"}')]


JSON = {
    "array": (b'[{"a": 1},\n {"a": 2}]', [(1, {"a": 1}), (2, {"a": 2})]),
    "object": (b'{"a": 1}', [(1, {"a": 1})]),
    "BOM": (b'\xef\xbb\xbf[{"a": 1}]', [(1, {"a": 1})]),
    "mixed": (b'[{"a": 1}, 7]', [(1, {"a": 1}), (2, "a JSON int, expected an object")]),
    "broken": (b'[{"a": 1},', [(1, "broken JSON: Expecting value: line 1 column 11 (char 10)")]),
    "not UTF-8": (b'["\xff"]', [(1, "not UTF-8 at byte 2")]),
    "empty array": (b"[]", []),
    "empty": (b"", [(1, "broken JSON: Expecting value: line 1 column 1 (char 0)")]),
}


@pytest.mark.parametrize(("content", "expected"), JSON.values(), ids=JSON)
def test_json(content: bytes, expected: list[Any], tmp_path: Path):
    assert read("rows.json", content, tmp_path) == expected


CSV = {
    "ok": (b"a,b\n1,x\n2,y\n", [(2, {"a": "1", "b": "x"}), (3, {"a": "2", "b": "y"})]),
    "BOM and CRLF": (b"\xef\xbb\xbfa,b\r\n1,x\r\n", [(2, {"a": "1", "b": "x"})]),
    "quotes over lines": (
        b'a,b\n1,"x\n""y"", z"\n2,w\n',
        [(3, {"a": "1", "b": 'x\n"y", z'}), (4, {"a": "2", "b": "w"})],
    ),
    "NUL": (b"a,b\n1,x\0y\n", [(2, {"a": "1", "b": "x\0y"})]),
    "short row": (b"a,b\n1\n", [(2, {"a": "1", "b": None})]),
    "extra field": (b"a,b\n1,x,y\n2,z\n", [(2, "more fields than the header has"), (3, {"a": "2", "b": "z"})]),
    "not UTF-8": (b"a,b\n1,\xff\n2,z\n", [(2, "not UTF-8"), (3, {"a": "2", "b": "z"})]),
    "text behind a quote": (
        b'a,b\n1,"x"y\n2,z\n',
        [(2, "broken CSV: ',' expected after '\"'"), (3, {"a": "2", "b": "z"})],
    ),
    "quote never closed": (
        b'a,b\n1,x\n2,"y\n3,z\n4,w\n',
        [(2, {"a": "1", "b": "x"}), *((line, "broken CSV: unexpected end of data") for line in (3, 4, 5))],
    ),
    "header never closed": (
        b'a,"b\n1,x\n',
        [(1, "broken CSV header: unexpected end of data"), (2, "broken CSV header: unexpected end of data")],
    ),
    "header alone": (b"a,b\n", []),
    "empty": (b"", []),
}


@pytest.mark.parametrize(("content", "expected"), CSV.values(), ids=CSV)
def test_csv(content: bytes, expected: list[Any], tmp_path: Path):
    assert read("rows.csv", content, tmp_path) == expected


def test_a_broken_csv_row_keeps_its_lines(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1,"x\n2,y\n')

    assert [row.raw for row in readers.read([str(path)], "line") if isinstance(row, Rejected)] == ['1,"x\n', "2,y\n"]


def test_parquet(tmp_path: Path):
    rows = [{"a": "x", "b": [{"role": "user", "content": "y"}]}, {"a": None, "b": []}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    assert read("rows.parquet", (tmp_path / "rows.parquet").read_bytes(), tmp_path) == [(1, rows[0]), (2, rows[1])]


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing PAR1", b"x" * 100], ids=["empty", "cut", "other"])
def test_broken_parquet(content: bytes, tmp_path: Path):
    ((line, reason),) = read("rows.parquet", content, tmp_path)

    assert line == 1
    assert reason.startswith("broken Parquet: ")


TEXT = b"one\r\ntwo\n\n \nthree\nfour"
SAMPLED = {
    "line": (TEXT, [(1, "one"), (2, "two"), (5, "three"), (6, "four")]),
    "paragraph": (TEXT, [(1, "one\r\ntwo\n"), (5, "three\nfour")]),
    "document": (TEXT, [(1, "one\r\ntwo\n\n \nthree\nfour")]),
}


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.TEXT"])
@pytest.mark.parametrize("sample_by", SAMPLED)
def test_text(sample_by: str, name: str, tmp_path: Path):
    content, expected = SAMPLED[sample_by]

    assert read(name, content, tmp_path, sample_by) == [(line, {"text": text}) for line, text in expected]


def test_text_that_is_not_utf8(tmp_path: Path):
    found = read("a.txt", b"\xef\xbb\xbfone\n\xff\nthree\n", tmp_path)

    assert found == [(1, {"text": "one"}), (2, "not UTF-8 at byte 0"), (3, {"text": "three"})]


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", b'{"a": 1}\n', (1, {"a": 1})),
        ("rows.csv", b"a\nx\n", (2, {"a": "x"})),
        ("rows.txt", b"x", (1, {"text": "x"})),
    ],
    ids=["jsonl", "csv", "txt"],
)
def test_compressed(name: str, content: bytes, expected: Any, suffix: str, tmp_path: Path):
    assert read(name + suffix, PACKERS[suffix](content), tmp_path) == [expected]


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("cut", [slice(0, -9), slice(9, None)], ids=["end", "start"])
def test_compressed_and_damaged(cut: slice, suffix: str, tmp_path: Path):
    packed = PACKERS[suffix](b'{"a": 1}\n' * 5000)

    with pytest.raises(UserError) as caught:
        read("rows.jsonl" + suffix, packed[cut], tmp_path)

    assert f"{tmp_path}/rows.jsonl{suffix} cannot be decompressed: " in str(caught.value)


def test_a_folder_a_glob_and_a_list(store: str, tmp_path: Path):
    storage = Storage(store)
    for name in ("in/b.jsonl", "in/a.jsonl", "in/deep/c.jsonl", "in/notes.bin", "out/d.jsonl"):
        storage.write(name, json.dumps({"a": name}).encode())

    def names(*sources: str) -> list[str]:
        rows = readers.read([f"{store}/{source}" for source in sources], "line")
        return [row.values["a"] for row in rows if isinstance(row, Row)]

    assert names("in") == ["in/a.jsonl", "in/b.jsonl", "in/deep/c.jsonl"]
    assert names("in/*.jsonl") == ["in/a.jsonl", "in/b.jsonl"]
    assert names("out", "in/b.jsonl") == ["out/d.jsonl", "in/b.jsonl"]


def test_a_name_with_brackets_is_a_name(tmp_path: Path):
    assert read("rows[1].jsonl", b'{"a": 1}', tmp_path) == [(1, {"a": 1})]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", "matches no file"),
        ("*.jsonl", "matches no file"),
        ("here.bin", "has type '.bin'. Supported: .jsonl, .json, .csv"),
        ("here.jsonl.zst", "has type '.zst'"),
    ],
    ids=["absent", "glob", "type", "compression"],
)
def test_a_source_that_cannot_be_used(name: str, message: str, tmp_path: Path):
    (tmp_path / "here.bin").write_bytes(b"x")
    (tmp_path / "here.jsonl.zst").write_bytes(b"x")

    with pytest.raises(UserError, match=r"data\.source") as caught:
        list(readers.read([f"{tmp_path}/{name}"], "line"))

    assert message in str(caught.value)


def test_the_builtin_source():
    rows = list(stdlib_docs.rows())

    assert len(rows) > 3000
    assert all(row["prompt"].startswith("def ") and 20 <= len(row["completion"]) <= 400 for row in rows)
    again = islice(readers.read(["builtin:stdlib-docs"], "line"), 500)
    assert [row.values for row in again if isinstance(row, Row)] == rows[:500]
