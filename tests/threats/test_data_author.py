"""What whoever writes the rows may do to the machine that reads them: memory, time, terminals."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from baton.data import encoding, ingest, normalize, pii, readers
from baton.data import rows as records
from baton.data.rows import MAX_ROW, SHOWN, SourceRow, UnusableRow
from tests.threats.marks import Mark

MIB = 2**20
LONG = 100 * MIB
BOUND = 512
"""MiB that reading a file may take, whatever is in it; text is below 128."""

MEASURE = """
import json, re, sys
from baton.data import readers
from baton.data.rows import SourceRow
def peak():
    return int(re.search("VmHWM:\\\\s+(\\\\d+)", open("/proc/self/status").read())[1]) // 1024
small, *files = sys.argv[1:]
list(readers.read(small, "line"))  # what is imported does not count
for file in files:
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # the peak begins anew
    before, rejected, usable = peak(), [], 0
    for row in readers.read(file, "line"):
        if isinstance(row, SourceRow):
            usable += 1
        else:
            rejected.append([row.line, row.reason, len(row.raw)])
        del row
    print(json.dumps([usable, rejected, peak() - before]))
"""


def measured(small: Path, *files: Path) -> list[tuple[int, list[Any], int]]:
    """Usable rows, rejected ones and MiB at the peak of each file, read by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, (small, *files))],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def write_text(path: Path, long: str) -> None:
    """Write three rows, of which the second is long."""
    before, between, after = {
        ".jsonl": ('{"text": "', '"}\n{"text": "', '"}\n'),
        ".json": ('[{"text": "', '"}, {"text": "', '"}]'),
        ".csv": ("text\n", "\n", "\n"),
        ".txt": ("", "\n", "\n"),
    }[path.suffix]
    path.write_text(f"{before}a{between}{long}{between}b{after}")


def write_table(path: Path, columns: dict[str, Any]) -> None:
    """Write a table, packed where its type can be."""
    made = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(made, path, compression="zstd", use_dictionary=False, data_page_size=MIB)
        return
    with pyarrow.ipc.new_file(path, made.schema) as opened:
        opened.write_table(made)


@pytest.mark.parametrize(
    "names",
    [
        ("rows.jsonl", "rows.parquet", "rows.arrow"),
        pytest.param(("rows.json", "rows.csv", "rows.txt"), marks=pytest.mark.slow),
    ],
    ids=["lines-and-tables", "others"],
)
def test_a_row_of_100_mb_costs_that_row_and_little_memory(names: tuple[str, ...], tmp_path: Path) -> None:
    long = "x" * LONG
    write_table(tmp_path / "small.parquet", {"text": ["a"]})
    for name in names:
        if name.endswith((".parquet", ".arrow")):
            write_table(tmp_path / name, {"text": ["a", long, "b"]})
        else:
            write_text(tmp_path / name, long)
    found = measured(tmp_path / "small.parquet", *(tmp_path / name for name in names))
    for name, (usable, rejected, peak) in zip(names, found, strict=True):
        ((line, reason, shown),) = rejected
        assert (name, usable, line) == (name, 2, 3 if name == "rows.csv" else 2)
        assert reason.endswith("longer than 64 MiB")
        assert 500 < shown <= SHOWN, "the row is kept, shortened"
        assert peak < BOUND, name


@pytest.mark.parametrize("name", ["rows.jsonl", pytest.param("rows.json", marks=pytest.mark.slow)])
def test_a_row_of_millions_of_values_costs_that_row_and_little_memory(name: str, tmp_path: Path) -> None:
    """27 MiB of empty lists, which Python holds in 25 times as much."""
    lists = "[" + "[]," * (9 * MIB) + "[]]"
    tracemalloc.start()
    held = json.loads(lists[: 3 * MIB + 1] + "[]]")
    assert tracemalloc.get_traced_memory()[0] > 20 * 3 * MIB, len(held)
    tracemalloc.stop()
    before, between, after = ("[", ", ", "]") if name == "rows.json" else ("", "\n", "\n")
    good = '{"text": "a"}'
    (tmp_path / name).write_text(before + between.join([good, f'{{"text": "a", "b": {lists}}}', good]) + after)
    (tmp_path / "small.jsonl").write_text(good)

    ((usable, ((line, reason, _),), peak),) = measured(tmp_path / "small.jsonl", tmp_path / name)
    assert (usable, line, reason) == (2, 2, "broken JSON: more than 1,000,000 brackets and commas")
    assert peak < BOUND


def test_a_string_of_quotes_that_does_not_end_is_gone_through_once(tmp_path: Path) -> None:
    """80 kB of it took 14 s, and the square of that: each quote was looked at as a beginning, up to the end."""
    (tmp_path / "small.jsonl").write_text('{"text": "a"}')
    (tmp_path / "rows.json").write_text('[{"text": "a"}, {"text": "' + '\\"' * MIB)
    ((usable, ((line, reason, _),), _),) = measured(tmp_path / "small.jsonl", tmp_path / "rows.json")
    assert (usable, line) == (1, 2)
    assert reason.startswith("broken JSON: Unterminated string")


def test_a_bomb_is_unpacked_piece_by_piece(tmp_path: Path) -> None:
    """Some 20 kB that unpack to 256 MiB and more: a line, and long values of a table."""
    lines, size = tmp_path / "rows.jsonl.zst", 2**28
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    with lines.open("wb") as file:
        for _ in range(size // MIB):
            file.write(packer.compress(b"x" * MIB))
        file.write(packer.flush())
    write_table(tmp_path / "rows.parquet", {"text": ["x" * (50 * MIB)] * 6})
    write_table(tmp_path / "rows.arrow", {"text": pyarrow.DictionaryArray.from_arrays([0] * 12, ["x" * (50 * MIB)])})
    assert lines.stat().st_size < 2**17
    assert (tmp_path / "rows.parquet").stat().st_size < 2**17
    with lines.open("rb") as file:
        assert sum(map(len, zstandard.ZstdDecompressor().read_to_iter(file))) == size
    write_table(tmp_path / "small.parquet", {"text": ["a"]})

    line, table, dictionary = measured(
        tmp_path / "small.parquet", lines, tmp_path / "rows.parquet", tmp_path / "rows.arrow"
    )
    assert line[:2] == (0, [[1, "longer than 64 MiB", SHOWN]])
    (usable, ((at, reason, _),), _) = table
    assert (usable, at) == (0, 1)
    assert re.fullmatch(r"broken Parquet: [\d,]{5,6} bytes of column text unpack to 314,57\d,\d+", reason)
    assert dictionary[:2] == (12, [])
    assert max(line[2], table[2], dictionary[2]) < BOUND


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.DictionaryArray.from_arrays([0, 1, 0], ["short", "x" * 3000]),
        pyarrow.DictionaryArray.from_arrays([0, 1, 0], [["short"], ["x" * 3000]]),
        pyarrow.array(["short", "x" * 3000, None], pyarrow.string_view()),
        pyarrow.array([b"short", b"x" * 3000, None], pyarrow.binary_view()),
        pyarrow.array([["short"], ["x"] * 3000, ["short"]]),
        pyarrow.array([{"a": "short"}, {"a": "x" * 3000}, {"a": "short"}]),
        pyarrow.array([[("a", "short")], [("a", "x" * 3000)], []]),
    ],
    ids=["dictionary", "dictionary-of-lists", "view", "binary-view", "list", "struct", "pairs"],
)
def test_a_long_row_of_a_table_costs_that_row_alone(
    column: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.data.readers.MAX_ROW", 2000)
    write_table(tmp_path / "rows.arrow", {"n": [1, 2, 3], "text": column})
    rows = list(readers.read(str(tmp_path / "rows.arrow"), "line"))
    is_vague = isinstance(column, pyarrow.DictionaryArray) and pyarrow.types.is_list(column.type.value_type)
    assert [isinstance(row, SourceRow) for row in rows] == ([False] * 3 if is_vague else [True, False, True])
    assert isinstance(rows[1], UnusableRow)
    assert (rows[1].line, rows[1].reason) == (2, "longer than 64 MiB")
    assert rows[1].raw.startswith("n: …, text: ")
    assert len(rows[1].raw) <= SHOWN


def broken(number: int) -> list[SourceRow | UnusableRow]:
    return [UnusableRow("f", line, "broken JSON", "{\ud800" + "x" * 100) for line in range(1, number + 1)]


def test_broken_rows_before_the_first_usable_one_wait_on_disk() -> None:
    """They decide nothing, and there may be a thousand million of them."""
    rows = [
        *broken(3),
        SourceRow("f", 4, {"text": "a"}),
        *broken(2),
        *(SourceRow("f", n, {"text": f"b{n}"}) for n in range(7, 40)),
    ]
    usable, again = ingest.first_usable(iter(rows))
    assert usable == [row for row in rows if isinstance(row, SourceRow)][: ingest.LOOKED_AT]
    assert list(again) == rows[: rows.index(usable[-1]) + 1]

    script = """
import json, re, resource, sys
from baton.data import ingest as intake
from baton.data.rows import UnusableRow
def peak():
    return int(re.search("VmHWM:\\\\s+(\\\\d+)", open("/proc/self/status").read())[1]) // 1024
count, before = 60_000, peak()
usable, again = intake.first_usable(UnusableRow("f", line, "broken JSON", "x" * 500) for line in range(count))
assert not usable and sum(1 for _ in again) == count
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20, "a list of them takes 50 MB"


def test_reasons_are_counted_by_how_rows_begin(tmp_path: Path) -> None:
    refused = records.RejectedRows(str(tmp_path / "rejected.jsonl"))
    row = UnusableRow("f", 1, "column 'side' is " + "y" * 5000, "x" * 5000)
    refused.add(row)
    refused.close()
    assert refused.first is not None
    assert max(len(refused.first.reason), len(refused.first.raw)) == SHOWN
    assert [kept == refused.first for _, kept in refused.reasons.values()] == [True]
    assert json.loads(Path(refused.path).read_text()) == vars(row), "the file has all of it"


SLOW = {
    "turns": (lambda text: normalize.parse_glaive(text, None), "\n" * 100_000),
    "declared functions": (lambda text: normalize.parse_glaive("USER: a\n", text + "x"), "\n \n" * 50_000),
    "numbers": (lambda text: bool(ingest.NUMBER.search(text)), "1" * 100_000 + "x"),
    "secrets": (pii.secrets, "password" * 12_000 + "://a:" * 12_000 + "-----BEGIN PRIVATE KEY-----" * 2000),
    "keys": (pii.secrets, "-----BEGIN RSA PRIVATE KEY-----\n" * 60_000),
    "tags": (encoding.TAGS.split, "\n" * 100_000),
    "addresses": (pii.emails, "a@" + "a." * 50_000 + "1"),
}


@pytest.mark.parametrize(("look", "text"), SLOW.values(), ids=SLOW)
def test_no_text_takes_more_time_than_its_length(look: Callable[[str], object], text: str) -> None:
    """What the expressions for numbers and turns were before took 10 and 4 s for a third of it."""
    began = time.process_time()
    look(text)
    assert time.process_time() - began < 2


def test_what_the_expressions_found_they_still_find() -> None:
    before = re.compile(r"\d[\d.,]*\W*$")
    for text in ("12", "1,234.5", "x 3.", "3 apples", "", "4 )", "4_", "٣", "5\n!", "a1b"):
        assert bool(ingest.NUMBER.search(text)) == bool(before.search(text)), text
    found = normalize.parse_glaive("\n\n USER: a\n\n\n\tASSISTANT: b \n", 'SYSTEM: x\n\n  \n {"name": "f"}\n')
    assert found is not None
    assert [turn["content"] for turn in found["messages"]] == ["a", "b"]
    assert found["tools"] == [{"name": "f"}]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_pickle_in_a_schema_is_not_unpickled(kind: str, tmp_path: Path) -> None:
    """Arrow once unpickled types of this name where a file was opened (CVE-2023-47248)."""
    mark = Mark(tmp_path)
    hidden = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(mark),
    }
    schema = pyarrow.schema([pyarrow.field("text", pyarrow.string(), metadata=hidden)])
    made, path = pyarrow.table({"text": ["a"]}, schema=schema), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(made, path)
    else:
        with pyarrow.ipc.new_file(path, schema) as opened:
            opened.write_table(made)
    assert pickle.dumps(mark) in path.read_bytes() or kind == "parquet"  # there it is in base 64
    assert [row.values for row in readers.read(str(path), "line") if isinstance(row, SourceRow)] == [{"text": "a"}]
    assert not mark.ran
    pickle.loads(hidden[b"ARROW:extension:metadata"])
    assert mark.ran


def test_no_csv_is_written() -> None:
    """Nothing for a spreadsheet to run: what begins with `=` in a row stays in JSON, HTML and text."""
    writing = re.compile(r"csv\.(Dict)?[wW]riter|\.to_csv|write_csv")
    root = Path(__file__).parents[2]
    files = [path for room in ("baton", "components", "pipelines") for path in (root / room).glob("**/*.py")]
    assert len(files) > 200
    assert writing.search("csv.writer(file)")
    assert [str(path) for path in files if writing.search(path.read_text(encoding="utf-8"))] == []


def test_a_packed_table_is_unpacked_to_disk(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.parquet", {"text": ["a"]})
    packed = tmp_path / "rows.parquet.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.parquet").read_bytes()))
    (row,) = readers.read(str(packed), "line")
    assert isinstance(row, SourceRow)
    assert MAX_ROW == 64 * MIB
