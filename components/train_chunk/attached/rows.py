"""What is known of a dataset that somebody else has prepared: enough to tell it from another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
import pyarrow as pa
import xxhash

from baton.components.shared.core.document import Json

AT_ONCE = 1000
"""Rows that are hashed at a time: a whole number of bytes also where a value takes one bit."""


def known(rows: Any) -> Json:
    """Returns the number of rows and the digest of their content; of what is no table, what can be told unread.

    Args:
        rows: A dataset, or several by name.
    """
    if isinstance(rows, Mapping):
        return {str(name): known(part) for name, part in rows.items()}
    if isinstance(rows, datasets.Dataset):
        return {"rows": len(rows), "columns": sorted(rows.column_names), "digest": digest(rows)}
    kind = f"{type(rows).__module__}.{type(rows).__qualname__}"
    if isinstance(rows, datasets.IterableDataset):
        return {"kind": kind, "columns": sorted(rows.column_names or [])}
    return {"kind": kind, "rows": len(rows) if hasattr(rows, "__len__") else None}


def digest(rows: datasets.Dataset) -> str:
    """Returns a digest of the rows in their order: the same for the same content, from whatever files and steps."""
    plain = rows.with_format("arrow")
    names = sorted(rows.column_names)
    whole = xxhash.xxh3_128()
    for start in range(0, len(rows), AT_ONCE):
        table = plain[start : start + AT_ONCE].select(names).replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        # Arrow's own format leaves out what lies before and after a slice, so that the files that rows come from do not
        # count.
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        whole.update(sink.getvalue())
    return whole.hexdigest()
