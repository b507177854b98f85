"""Rows as Arrow streams that `datasets` maps from disk, written batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.components.shared.models import packing, prompt_columns
from baton.components.shared.recipe import Data
from baton.components.tokenize.encoding import Row

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Written:
    """Counts of a written file.

    Attributes:
        rows: Sequences.
        tokens: Of all columns that hold a sequence.
    """

    rows: int = 0
    tokens: int = 0


def write(path: str, batches: Iterable[list[Row]], *, wide: bool = False) -> Written:
    """Writes rows as they come, all with the same columns; no file where there are none.

    Args:
        path: The file.
        batches: The rows.
        wide: Whether prompts may hold more than messages of role and content: see `prompt_columns`.
    """
    batches = ([prompt_columns.stored(row) for row in batch] for batch in batches) if wide else batches
    return _stream(path, (_table(batch, wide=wide) for batch in batches))


def write_packed(path: str, batches: Iterable[list[Row]], data: Data, *, is_all: bool) -> Written:
    """Writes rows joined to sequences; see `packing.packed`.

    Args:
        path: The file.
        batches: Rows with the same columns.
        data: Says how to pack.
        is_all: Whether the side has no other rows than these.
    """
    import pyarrow as pa

    tables = [_table([{name: row[name] for name in ("input_ids", "labels")} for row in batch]) for batch in batches]
    return _stream(path, [packing.packed(pa.concat_tables(tables), data, is_all=is_all)]) if tables else Written()


def _stream(path: str, tables: Iterable[pa.Table]) -> Written:
    import pyarrow as pa
    import pyarrow.compute as pc

    written = Written()
    writer: pa.RecordBatchStreamWriter | None = None
    try:
        for table in tables:
            writer = writer or pa.ipc.new_stream(path, table.schema)
            writer.write_table(table, max_chunksize=1000)
            written.rows += len(table)
            written.tokens += _tokens(table, pc)
    finally:
        if writer:
            writer.close()
    return written


def _tokens(table: pa.Table, pc: Any) -> int:
    if "length" in table.column_names:
        return int(pc.sum(table["length"]).as_py())
    ids = [name for name in table.column_names if name.endswith("_ids")]
    return sum(int(pc.sum(pc.list_value_length(table[name])).as_py() or 0) for name in ids)


def _table(rows: Sequence[Row], *, wide: bool = False) -> pa.Table:
    import pyarrow as pa

    kinds = {name: _kind(name, value, wide=wide) for name, value in rows[0].items()}
    return pa.table({name: pa.array([row[name] for row in rows], type=kind) for name, kind in kinds.items()})


def _kind(name: str, value: Any, *, wide: bool) -> pa.DataType:
    """Returns a column's type by its name and first value; that of an empty list would not show what it is of."""
    import pyarrow as pa

    if name.endswith("_ids") or name == "labels":
        return pa.list_(pa.int32())
    if isinstance(value, list):
        return pa.list_(prompt_columns.message_kind(wide=wide))
    if wide and name == prompt_columns.TOOLS:
        return pa.string()
    return {str: pa.string(), bool: pa.bool_(), int: pa.int32()}[type(value)]
