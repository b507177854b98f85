"""Small files that are gigabytes when unpacked: memory stays within bounds, and what is too much is rejected."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from baton.data import readers as bounds
from baton.data.rows import TOO_LONG, SourceRow, UnusableRow
from baton.store.storage import Storage
from tests.data.splitting import split
from tests.data.test_readers_fuzz import PACKED, measured, read

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
MEBI = 2**20


def parquet(column: pyarrow.Array, **options: object) -> bytes:
    """A file of one column and one page, which says nothing of Arrow's types."""
    sink = io.BytesIO()
    table = pyarrow.table({"a": column})
    pyarrow.parquet.write_table(table, sink, compression="zstd", store_schema=False, write_statistics=False, **options)
    return sink.getvalue()


def arrow(column: pyarrow.Array) -> bytes:
    """A file of one column and one batch."""
    sink = io.BytesIO()
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    table = pyarrow.table({"a": column})
    with pyarrow.ipc.new_file(sink, table.schema, options=options) as opened:
        opened.write_table(table)
    return sink.getvalue()


def text(size: int) -> pyarrow.Array:
    """A row of so many MiB."""
    return pyarrow.array(["x" * (size * MEBI)])


def shared(rows: int, size: int) -> pyarrow.Array:
    """Rows that have one text of so many MiB."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(numpy.zeros(rows, "int32")), text(size))


LONG = {
    "a text in Parquet": ("rows.parquet", lambda: parquet(text(65), use_dictionary=False)),
    "a text in Arrow": ("rows.arrow", lambda: arrow(text(65))),
    "a text that is shared in Arrow": ("rows.arrow", lambda: arrow(shared(1, 65))),
}


@pytest.mark.parametrize(("name", "make"), LONG.values(), ids=LONG)
def test_a_row_of_a_table_that_is_longer_than_rows_may_be(name: str, make: Callable[[], bytes]) -> None:
    content = make()
    assert len(content) < MEBI

    (found,) = read(name, content)

    assert isinstance(found, UnusableRow)
    assert (found.line, found.reason, found.rest) == (1, TOO_LONG, False)


def test_rows_that_share_a_long_text_are_read_one_by_one() -> None:
    found = read("rows.arrow", arrow(shared(3, 33)))
    assert [isinstance(row, SourceRow) for row in found] == [True] * 3


AT_ONCE = "at once; write it in smaller pages, row groups or batches True"
BOMBS = {
    "a page": ("rows.parquet", lambda: parquet(text(300), use_dictionary=False), "bytes of column a unpack to "),
    "a text of many rows": ("rows.parquet", lambda: parquet(shared(20, 33)), AT_ONCE),
    "a batch": ("rows.arrow", lambda: arrow(text(300)), AT_ONCE),
}
REASON = """
import sys
from baton.data import readers
readers.HELD = 2**28
print(*(f"{found.reason} {found.rest}" for found in readers.read(sys.argv[1], "line")), sep="\\n")
"""


@pytest.mark.parametrize(("name", "make", "said"), BOMBS.values(), ids=BOMBS)
def test_a_part_of_a_table_that_takes_more_than_it_may(
    name: str, make: Callable[[], bytes], said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(make())
    assert path.stat().st_size < MEBI

    # In a process of its own: what this one has taken and given back before does not count as more.
    done = subprocess.run([sys.executable, "-c", REASON, str(path)], capture_output=True, text=True, check=True)

    (line,) = done.stdout.splitlines()
    assert said in line


def test_the_bound_holds_in_its_block_alone() -> None:
    with bounds.bounded(2**28):
        with pytest.raises(MemoryError):
            bytearray(2**29)
        assert len(bytearray(2**26)) == 2**26
    assert len(bytearray(2**29)) == 2**29


MEMBERS = 16
"""Parts of a packed file, each 64 MiB of one letter: a GiB in all."""
TEXTS = {"rows.jsonl": "line", "rows.csv": "line", "rows.txt": "document"}


@pytest.mark.slow
@pytest.mark.parametrize("packing", [packing for packing in PACKED if packing])
def test_a_gigabyte_that_was_packed(packing: str, tmp_path: Path) -> None:
    member = PACKED[packing](b"0" * 64 * MEBI)
    for name, sample_by in TEXTS.items():
        path = tmp_path / f"{name}{packing}"
        path.write_bytes(member * MEMBERS)
        assert path.stat().st_size < 1.1 * MEBI
        count, peak = measured(path, sample_by)
        assert count == 0
        assert peak < 200, name
    path = tmp_path / f"rows.json{packing}"
    path.write_bytes(PACKED[packing](b'[{"') + member * MEMBERS)
    count, peak = measured(path)
    assert (count, peak < 400) == (0, True), peak


@pytest.mark.slow
def test_memory_of_a_table_that_would_be_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet(shared(63, 33)))
    count, peak = measured(path)
    assert (count, peak < bounds.HELD // MEBI + 100) == (0, True), peak


@pytest.mark.s3
def test_a_bound_on_memory_meets_no_other_work_of_baton(s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the process's: whatever sends or writes beside a table that is read could meet it."""
    before, beside, limits = set(threading.enumerate()), set[str](), []
    limit = resource.setrlimit

    def watched(kind: int, values: tuple[int, int]) -> None:
        limits.append(kind)
        beside.update(thread.name for thread in set(threading.enumerate()) - before)
        limit(kind, values)

    monkeypatch.setattr(resource, "setrlimit", watched)
    rows = pyarrow.table({"prompt": [f"{n}?" for n in range(600)], "completion": ["yes"] * 600})
    sink = io.BytesIO()
    pyarrow.parquet.write_table(rows, sink, row_group_size=100)
    storage = Storage(s3_store)
    storage.write("rows/a.parquet", sink.getvalue())
    storage.write("rows/b.parquet", sink.getvalue())
    assert split(s3_store, f"{s3_store}/rows/*.parquet")["rows"] == 1200
    assert limits.count(resource.RLIMIT_DATA) > 4
    assert beside <= {"fsspecIO"}, "fetches what is read, and tells its error to who reads"
