"""Users' rows in a cloud: listed, read from front to end and by column, and known again."""

from __future__ import annotations

import io
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from baton import retrain
from baton.data import readers
from baton.store.clouds import SCHEMES
from baton.store.sources import files
from baton.store.storage import Storage

pytestmark = pytest.mark.s3


@pytest.fixture(params=SCHEMES)
def storage(request: pytest.FixtureRequest) -> Storage:
    """A store with rows in two kinds of files."""
    uri: str = request.getfixturevalue(f"{request.param}_store")
    storage, packed = Storage(uri), io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "é"], "unused": [1, 2]}), packed)
    storage.write("rows/b.parquet", packed.getvalue())
    storage.write("rows/a.jsonl", '{"text": "ü"}\n'.encode() * 100_000)
    return storage


def test_rows_in_a_cloud(storage: Storage):
    lines, columns = files([storage.uri("rows")])
    assert [file.suffix for file in (lines, columns)] == [".jsonl", ".parquet"]
    assert b"".join(readers.blocks(lines)) == storage.read("rows/a.jsonl")
    rows: list[Any] = list(readers.read_parquet(columns))
    assert [row.values["text"] for row in rows] == ["a", "é"]


def test_a_whole_bucket_is_a_source(storage: Storage):
    assert [file.uri for file in files([storage.uri()])] == [file.uri for file in files([storage.uri("rows")])]


def test_a_file_of_the_same_size_is_known_for_another(storage: Storage):
    (file,) = files([storage.uri("rows/a.jsonl")])
    before = retrain._signature(file)
    assert retrain._signature(file) == before
    storage.write("rows/a.jsonl", '{"text": "ö"}\n'.encode() * 100_000)
    assert retrain._signature(file) != before
