"""Readers: every row of every file type, and each that cannot be read with its place and reason."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import struct
import zlib
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from baton.data import readers
from baton.data.rows import SourceRow, UnusableRow
from baton.errors import UserError
from baton.store import sources
from baton.store.storage import Storage


def read(name: str, content: bytes, tmp_path: Path, sample_by: str = "line") -> list[tuple[int, Any]]:
    """Write a file and read it: line and values of each row, line and reason of each that is rejected."""
    (tmp_path / name).write_bytes(content)
    found = list(readers.read(str(tmp_path / name), sample_by))
    assert {row.file for row in found} <= {str(tmp_path / name)}
    return [(row.line, row.values if isinstance(row, SourceRow) else row.reason) for row in found]


JSONL = {
    "ok": (b'{"a": 1}\n{"a": 2}\n', [(1, {"a": 1}), (2, {"a": 2})]),
    "no newline at the end": (b'{"a": 1}', [(1, {"a": 1})]),
    "empty lines": (b'\n{"a": 1}\n  \n\r\n{"a": 2}\n\n', [(2, {"a": 1}), (5, {"a": 2})]),
    "CRLF": (b'{"a": "x"}\r\n{"a": "y"}\r\n', [(1, {"a": "x"}), (2, {"a": "y"})]),
    "BOM": (b'\xef\xbb\xbf{"a": 1}\n', [(1, {"a": 1})]),
    "separators inside": ('{"a": "x\u2028y\x85z"}\n'.encode(), [(1, {"a": "x\u2028y\x85z"})]),
    "a key twice": (
        b'{"a": 1, "b": {"c": 1, "c": 2}}\n{"a": 2}\n',
        [(1, "broken JSON: key 'c' is there twice"), (2, {"a": 2})],
    ),
    "a key twice, the same": (b'{"a": 1, "a": 1}\n', [(1, "broken JSON: key 'a' is there twice")]),
    "a key on two levels": (b'{"a": {"a": 1}}\n', [(1, {"a": {"a": 1}})]),
    "a number of many digits": (b'{"a": 1, "b": %s}\n' % (b"7" * 6000), [(1, {"a": 1, "b": "7" * 6000})]),
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
    "BOM of UTF-16": ('{"a": "é"}'.encode("utf-16"), [(1, {"a": "é"})]),
    "BOM of UTF-16, the other way": (b"\xfe\xff" + '{"a": 1}'.encode("utf-16-be"), [(1, {"a": 1})]),
    "BOM of UTF-32": ('{"a": 1}'.encode("utf-32"), [(1, {"a": 1})]),
    "half a character of UTF-16": (
        '{"a": 1}\n{'.encode("utf-16")[:-1],
        [(1, {"a": 1}), (2, "not utf-16: 'utf-16-le' codec can't decode byte 0x7b in position 0: truncated data")],
    ),
    "half a pair of UTF-16": (
        '{"a": "\ud800"}\n{"a": 2}'.encode("utf-16", "surrogatepass"),
        [(1, "not UTF-8 at byte 7"), (2, {"a": 2})],
    ),
    "CR alone": (b'{"a": 1}\r{"a": 2}\r', [(1, {"a": 1}), (2, {"a": 2})]),
    "an array over lines": (b'[\n {"a": 1},\n {"a": 2}\n]\n', [(1, {"a": 1}), (2, {"a": 2})]),
    "an array on one line": (b'[{"a": 1}, {"a": 2}]\n', [(1, {"a": 1}), (2, {"a": 2})]),
    "an array on each line": (
        b'[{"a": 1}]\n[{"a": 2}]\n',
        [(1, "a JSON list, expected an object"), (2, "a JSON list, expected an object")],
    ),
    "empty": (b"", []),
}


@pytest.mark.parametrize(("content", "expected"), JSONL.values(), ids=JSONL)
def test_jsonl(content: bytes, expected: list[Any], tmp_path: Path):
    assert read("rows.jsonl", content, tmp_path) == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_that_is_too_much_for_the_parser(name: str, tmp_path: Path):
    ((line, found),) = read(name, b'{"a": ' + b"[" * 100_000 + b"}", tmp_path)

    assert line == 1
    assert found.startswith("broken JSON: maximum recursion depth")


def test_a_rejected_row_keeps_what_was_read(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "\xff\xc3\xa9"}\n')

    assert list(readers.read(str(path), "line")) == [
        UnusableRow(str(path), 1, "not UTF-8 at byte 7", '{"a": "\\xffé"}')
    ]


BROKEN_AT_6 = "broken JSON: Expecting value: line 1 column 7 (char 6)"
JSON = {
    "array": (b'[{"a": 1},\n {"a": 2}]', [(1, {"a": 1}), (2, {"a": 2})]),
    "object": (b'{"a": 1}', [(1, {"a": 1})]),
    "BOM": (b'\xef\xbb\xbf[{"a": 1}]', [(1, {"a": 1})]),
    "mixed": (b'[{"a": 1}, 7]', [(1, {"a": 1}), (2, "a JSON int, expected an object")]),
    "cut behind a comma": (b'[{"a": 1},', [(1, {"a": 1}), (2, "broken JSON: the array does not end")]),
    "cut behind a value": (b'[{"a": 1}', [(1, {"a": 1}), (2, "broken JSON: the array does not end")]),
    "cut inside a value": (
        b'[{"a": 1}, {"a": "x',
        [(1, {"a": 1}), (2, "broken JSON: Unterminated string starting at")],
    ),
    "a broken value among others": (
        b'[{"a": 1}, {"a": }, {"b": "}"}, {"a": 3}]',
        [(1, {"a": 1}), (2, "broken JSON: Expecting value"), (3, {"b": "}"}), (4, {"a": 3})],
    ),
    "a comma is missing": (b'[{"a": 1} {"a": 2}]', [(1, {"a": 1}), (2, "broken JSON: expected , or ]")]),
    "a comma too many": (b'[{"a": 1},, {"a": 2}]', [(1, {"a": 1}), (2, "broken JSON: Expecting value"), (3, {"a": 2})]),
    "a key twice": (b'[{"a": 1, "a": 2}, {"a": 3}]', [(1, "broken JSON: key 'a' is there twice"), (2, {"a": 3})]),
    "a number of many digits": (b'[{"a": %s}]' % (b"7" * 6000), [(1, {"a": "7" * 6000})]),
    "text after": (b'[{"a": 1}] x', [(1, {"a": 1}), (2, "broken JSON: text after the array")]),
    "not UTF-8": (b'["\xff", {"a": 1}]', [(1, "not UTF-8"), (2, {"a": 1})]),
    "escaped surrogate": (b'[{"a": "\\udcff"}]', [(1, {"a": "\udcff"})]),
    "lines": (b'{"a": 1}\n{"a": \n{"a": 3}', [(1, {"a": 1}), (2, BROKEN_AT_6), (3, {"a": 3})]),
    "objects over lines": (b'{\n "a": 1\n}\n{\n "a": {"b": 2}\n}', [(1, {"a": 1}), (2, {"a": {"b": 2}})]),
    "an object that is broken": (b'{\n "a": }\n{\n "a": 2}', [(1, "broken JSON: Expecting value"), (2, {"a": 2})]),
    "words": (b"hello", [(1, "broken JSON: Expecting value")]),
    "empty array": (b"[]", []),
    "empty": (b"", []),
}


@pytest.mark.parametrize(("content", "expected"), JSON.values(), ids=JSON)
def test_json(content: bytes, expected: list[Any], tmp_path: Path):
    assert read("rows.json", content, tmp_path) == expected


QUOTE = "put texts that hold ',' in quotes, or set data.csv.delimiter"
ENCODING = "save it as UTF-8, or set data.csv.encoding, maybe to cp1252 (it reads 'ÿ' then)"
CSV = {
    "ok": (b"a,b\n1,x\n2,y\n", [(2, {"a": "1", "b": "x"}), (3, {"a": "2", "b": "y"})]),
    "BOM and CRLF": (b"\xef\xbb\xbfa,b\r\n1,x\r\n", [(2, {"a": "1", "b": "x"})]),
    "quotes over lines": (
        b'a,b\n1,"x\n""y"", z"\n2,w\n',
        [(3, {"a": "1", "b": 'x\n"y", z'}), (4, {"a": "2", "b": "w"})],
    ),
    "NUL": (b"a,b\n1,x\0y\n", [(2, {"a": "1", "b": "x\0y"})]),
    "short row": (b"a,b\n1\n", [(2, {"a": "1", "b": None})]),
    "extra field": (
        b"a,b\n1,x,y\n2,z\n",
        [(2, f"more fields than the header has; {QUOTE}"), (3, {"a": "2", "b": "z"})],
    ),
    "not UTF-8": (b"a,b\n1,\xff\n2,z\n", [(2, f"not UTF-8; {ENCODING}"), (3, {"a": "2", "b": "z"})]),
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
    "semicolons": (b"a;b\n1;x,y\n", [(2, {"a": "1", "b": "x,y"})]),
    "tabs": (b"a\tb\n1\tx,y\n", [(2, {"a": "1", "b": "x,y"})]),
    "a column named twice": (
        b"a,a\n1,x\n2,y\n",
        [(line, "broken CSV header: more than one column is called 'a'; rename one") for line in (1, 2, 3)],
    ),
    "blank lines": (b"\n\na,b\n\n1,x\n\n", [(5, {"a": "1", "b": "x"})]),
    "UTF-16": ("a,b\n1,x\n".encode("utf-16"), [(2, {"a": "1", "b": "x"})]),
    "header alone": (b"a,b\n", []),
    "empty": (b"", []),
}


@pytest.mark.parametrize(("content", "expected"), CSV.values(), ids=CSV)
def test_csv(content: bytes, expected: list[Any], tmp_path: Path):
    assert read("rows.csv", content, tmp_path) == expected


def test_a_broken_csv_row_keeps_its_lines(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1,"x\n2,y\n')

    assert [row.raw for row in readers.read(str(path), "line") if isinstance(row, UnusableRow)] == ['1,"x\n', "2,y\n"]


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


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".zst": zstandard.compress,
}


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
def test_several_packed_parts_are_one_file(suffix: str, tmp_path: Path):
    packed = b"".join(PACKERS[suffix](b'{"a": %d}\n' % number) for number in range(3))

    assert read("rows.jsonl" + suffix, packed, tmp_path) == [(1, {"a": 0}), (2, {"a": 1}), (3, {"a": 2})]


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_without_being_named_so(suffix: str, tmp_path: Path):
    packed = PACKERS[suffix](b'{"a": 1}\n')

    assert read("rows.jsonl", packed, tmp_path) == [(1, {"a": 1})]
    assert read("rows.txt", b"BZh is how bzip2 begins", tmp_path) == [(1, {"text": "BZh is how bzip2 begins"})]


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_and_cut_off(suffix: str, tmp_path: Path):
    """What comes before the damage is read, and the line in which it lies is kept with the reason."""
    whole = [b'{"a": "%s"}\n' % hashlib.sha256(b"%d" % number).hexdigest().encode() for number in range(30000)]
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](b"".join(whole))[:-100_000])

    *good, last = readers.read(str(path), "line")

    assert isinstance(last, UnusableRow)
    assert 10_000 < len(good) < 30_000
    assert [row.values for row in good if isinstance(row, SourceRow)] == [
        json.loads(line) for line in whole[: len(good)]
    ]
    assert (last.line, last.rest) == (len(good) + 1, True)
    assert last.reason.startswith("cannot be decompressed: ")
    assert whole[len(good)].decode().startswith(last.raw)


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_and_cut_at_the_start(suffix: str, tmp_path: Path):
    found = read("rows.jsonl" + suffix, PACKERS[suffix](b'{"a": 1}\n' * 5000)[9:], tmp_path)

    assert found == [(1, f"cannot be decompressed: it does not begin like {suffix[1:]}")]


CUT_OFF = {
    "csv": ("csv", b'a,b\n1,x\n2,"y\nz', [(2, {"a": "1", "b": "x"})], 3, '2,"y\nz'),
    "paragraph": ("txt", b"one\n\ntwo\nthr", [(1, {"text": "one\n"})], 3, "two\nthr"),
    "array": ("json", b'[{"a": 1}, {"a": 2', [(1, {"a": 1})], 2, '{"a": 2'),
}


@pytest.mark.parametrize(("suffix", "content", "expected", "line", "raw"), CUT_OFF.values(), ids=CUT_OFF)
def test_what_is_half_read_is_kept(
    suffix: str, content: bytes, expected: list[Any], line: int, raw: str, tmp_path: Path
):
    path = tmp_path / f"rows.{suffix}.gz"
    packer = zlib.compressobj(wbits=31)
    path.write_bytes(packer.compress(content) + packer.flush(zlib.Z_SYNC_FLUSH))

    *good, last = readers.read(str(path), "paragraph")

    assert [(row.line, row.values) for row in good if isinstance(row, SourceRow)] == expected
    assert isinstance(last, UnusableRow)
    assert (last.line, last.raw, last.rest) == (line, raw, True)


ROWS = [{"a": "x", "b": [{"role": "user", "content": "y"}]}, {"a": None, "b": []}]


def arrow_file(rows: list[Any], kind: str) -> bytes:
    """Rows as an Arrow file or stream."""
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    writer = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with writer(sink, table.schema) as opened:
        opened.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow(kind: str, packed: str, tmp_path: Path):
    content = arrow_file(ROWS, kind)

    found = read(f"rows.arrow{packed}", PACKERS[packed](content) if packed else content, tmp_path)

    assert found == [(1, ROWS[0]), (2, ROWS[1])]


LONG: dict[str, tuple[dict[str, Any], bool]] = {
    "a text": ({"text": "a" * 64}, False),
    "a text too long": ({"text": "a" * 65}, True),
    "letters of two bytes": ({"text": "ä" * 33}, True),
    "messages": (
        {"messages": [{"role": "user", "content": "a" * 30}, {"role": "assistant", "content": "b" * 30}]},
        True,
    ),
    "bytes": ({"image": {"bytes": b"a" * 65}}, True),
    "numbers": ({"scores": [1.5] * 8}, True),
    "a lone surrogate": ({"text": "\ud800" * 33}, True),
    "nothing": ({"text": None, "more": None}, False),
}


@pytest.mark.parametrize(("values", "too_long"), LONG.values(), ids=LONG)
def test_a_row_of_the_hub_may_be_as_long_as_one_of_a_file(
    values: dict[str, Any], too_long: bool, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"text": "first"}, values, {"text": "last"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter(rows))
    monkeypatch.setattr(readers, "MAX_ROW", 68)
    first, found, last = readers.read("hf://datasets/org/name", "line")
    assert [row.line for row in (first, found, last)] == [1, 2, 3]
    assert isinstance(found, UnusableRow if too_long else SourceRow)
    if isinstance(found, UnusableRow):
        assert found.reason == "longer than 64 MiB"
        assert found.raw.startswith(f"{next(iter(values))}: ")
        found.raw.encode()


def test_what_datasets_saves_to_disk(tmp_path: Path):
    import datasets

    saved = tmp_path / "saved"
    datasets.Dataset.from_list([{"a": number} for number in range(2500)]).save_to_disk(str(saved), num_shards=2)
    (saved / "cache-0123456789abcdef.arrow").write_bytes(arrow_file([{"a": -1}], "stream"))

    kinds: list[str] = []
    rows = [row.values["a"] for row in readers.read(str(saved), "line", kinds.append) if isinstance(row, SourceRow)]

    assert rows == list(range(2500))
    assert kinds == ["arrow", "arrow"]


def test_a_parquet_value_that_is_not_utf8_costs_its_row_alone(tmp_path: Path):
    values = pyarrow.array([b"one", b"\xff", b"three"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"a": values}), tmp_path / "rows.parquet")

    first, second, third = read("rows.parquet", (tmp_path / "rows.parquet").read_bytes(), tmp_path)

    assert (first, third) == ((1, {"a": "one"}), (3, {"a": "three"}))
    assert second[0] == 2
    assert second[1].startswith("broken value: ")


def test_arrow_whose_offsets_lie(tmp_path: Path):
    """Offsets that point behind the values would make the library read memory that is not the file's."""
    content = arrow_file([{"a": "abcd"}, {"a": "efgh"}], "stream")
    offsets = struct.pack("<3i", 0, 4, 8)
    assert content.count(offsets) == 1

    found = read("rows.arrow", content.replace(offsets, struct.pack("<3i", 0, 4, 2**30)), tmp_path)

    assert found[0] == (1, {"a": "abcd"})
    assert [line for line, _ in found] == [1, 2]
    assert found[1][1].startswith("broken value: ")


def test_an_arrow_stream_that_was_cut_between_batches(tmp_path: Path):
    content = arrow_file([{"a": 1}], "stream")
    assert content.endswith(b"\xff\xff\xff\xff\0\0\0\0")

    found = read("rows.arrow", content[:-8], tmp_path)

    assert found == [(1, {"a": 1}), (2, "broken Arrow: it stops before its end")]


def test_a_parquet_file_that_is_damaged_inside(tmp_path: Path):
    rows = [{"a": hashlib.sha256(b"%d" % number).hexdigest()} for number in range(5000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1000)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    at = len(content) // 2
    content[at : at + 2000] = b"\xff" * 2000

    found = read("rows.parquet", bytes(content), tmp_path)

    *good, (line, reason) = found
    assert [values for _, values in good] == rows[: len(good)]
    assert line == len(good) + 1 <= 3000
    assert reason.startswith(("broken Parquet: ", "broken value: "))


CONTENTS = {
    "parquet called jsonl": ("rows.jsonl", "parquet"),
    "arrow called txt": ("rows.txt", "arrow"),
    "jsonl called bin": ("rows.bin", "jsonl"),
    "json without a suffix": ("rows", "json"),
    "jsonl called json": ("rows.json", "jsonl"),
    "tsv": ("rows.tsv", "tsv"),
    "ndjson": ("rows.ndjson", "jsonl"),
    "feather": ("rows.feather", "arrow"),
}


@pytest.mark.parametrize(("name", "kind"), CONTENTS.values(), ids=CONTENTS)
def test_the_content_tells_what_a_file_is(name: str, kind: str, tmp_path: Path):
    table = pyarrow.Table.from_pylist([{"a": "x"}, {"a": "y"}])
    pyarrow.parquet.write_table(table, tmp_path / "made")
    content = {
        "parquet": (tmp_path / "made").read_bytes(),
        "arrow": arrow_file([{"a": "x"}, {"a": "y"}], "file"),
        "jsonl": b'{"a": "x"}\n{"a": "y"}\n',
        "json": b'[{"a": "x"}, {"a": "y"}]',
        "tsv": b"a\nx\ny\n",
    }[kind]
    (tmp_path / name).write_bytes(content)
    seen: list[str] = []

    found = list(readers.read(str(tmp_path / name), "line", seen.append))

    assert [row.values for row in found if isinstance(row, SourceRow)] == [{"a": "x"}, {"a": "y"}]
    assert seen == [kind]


def test_a_folder_a_glob_and_a_list(store: str, tmp_path: Path):
    storage = Storage(store)
    for name in ("in/b.jsonl", "in/a.jsonl", "in/deep/c.jsonl", "in/notes.bin", "out/d.jsonl"):
        storage.write(name, json.dumps({"a": name}).encode())

    def names(*sources: str) -> list[str]:
        rows = chain.from_iterable(readers.read(f"{store}/{source}", "line") for source in sources)
        return [row.values["a"] for row in rows if isinstance(row, SourceRow)]

    assert names("in") == ["in/a.jsonl", "in/b.jsonl", "in/deep/c.jsonl"]
    assert names("in/*.jsonl") == ["in/a.jsonl", "in/b.jsonl"]
    assert names("out", "in/b.jsonl") == ["out/d.jsonl", "in/b.jsonl"]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.arrow.zst", "rows.csv.gz", "rows.json.xz"])
def test_types_in_a_store(name: str, store: str, tmp_path: Path):
    rows = [{"a": f"row {number}"} for number in range(1000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "made")
    kind = name.split(".")[1]
    content = {
        "parquet": (tmp_path / "made").read_bytes(),
        "arrow": arrow_file(rows, "file"),
        "csv": b"a\n" + b"".join(row["a"].encode() + b"\n" for row in rows),
        "json": json.dumps(rows).encode(),
    }[kind]
    packed = name.partition(kind)[2]
    Storage(store).write(name, PACKERS[packed](content) if packed else content)

    found = list(readers.read(f"{store}/{name}", "line"))

    assert [row.values for row in found if isinstance(row, SourceRow)] == rows
    assert len(found) == 1000


FOLDERS = {
    "text beside tables": (["README.md", "data/a.jsonl"], ["data/a.jsonl"]),
    "text alone": (["a.md", "b.txt"], ["a.md", "b.txt"]),
    "hidden": ([".git/a.jsonl", ".b.jsonl", "c.jsonl"], ["c.jsonl"]),
    "notes of datasets": (["state.json", "dataset_info.json", "a.jsonl"], ["a.jsonl"]),
    "packed": (["a.jsonl.zst", "b.csv.gz", "c.zip"], ["a.jsonl.zst", "b.csv.gz"]),
}


@pytest.mark.parametrize(("names", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_files_of_a_folder(names: list[str], expected: list[str], store: str):
    for name in names:
        Storage(store).write(f"in/{name}", b"x")

    assert [file.path.removeprefix("in/") for file in sources.files([f"{store}/in"])] == expected


def test_a_name_with_brackets_is_a_name(tmp_path: Path):
    assert read("rows[1].jsonl", b'{"a": 1}', tmp_path) == [(1, {"a": 1})]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", "matches no file"),
        ("*.jsonl", "matches no file"),
        ("here.bin", "has type '.bin', and its content is of no known one. Supported: .jsonl, .ndjson, .json, .csv"),
        ("here.jsonl.lz4", "has type '.lz4'"),
    ],
    ids=["absent", "glob", "type", "compression"],
)
def test_a_source_that_cannot_be_used(name: str, message: str, tmp_path: Path):
    (tmp_path / "here.bin").write_bytes(b"x")
    (tmp_path / "here.jsonl.lz4").write_bytes(b"x")

    with pytest.raises(UserError, match=r"data\.source") as caught:
        list(readers.read(f"{tmp_path}/{name}", "line"))

    assert message in str(caught.value)


def test_the_builtin_source():
    rows = list(islice(readers.stdlib_rows(), 3000))

    assert len(rows) == 3000
    assert all(row["prompt"].startswith("def ") and 20 <= len(row["completion"]) <= 400 for row in rows)
    again = islice(readers.read("builtin:stdlib-docs", "line"), 500)
    assert [row.values for row in again if isinstance(row, SourceRow)] == rows[:500]
