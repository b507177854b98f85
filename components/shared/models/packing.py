"""Rows joined to sequences, as TRL's `pack_dataset` does it: their lengths alone decide which come together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.components.shared.recipe import Data

if TYPE_CHECKING:
    import pyarrow as pa


def packs(data: Data, side: str) -> bool:
    """Tells whether the rows of a side are joined."""
    return data.packing is True or (data.packing == "best-fit" and side == "train")


def packed(rows: pa.Table, data: Data, *, is_all: bool) -> pa.Table:
    """Joins rows to sequences of `data.max_length`, a thousand at a time.

    With `best-fit`, `seq_lengths` says where each row ends in its sequence. Else what does not fill a sequence at the
    end of a thousand is left out, unless there is nothing else.

    Args:
        rows: Columns of tokens.
        data: Says how to pack.
        is_all: Whether the side has no other rows than these.
    """
    import datasets
    import pyarrow.compute as pc
    from trl import pack_dataset

    datasets.disable_progress_bars()
    strategy = "bfd" if data.packing == "best-fit" else "wrapped"
    table: pa.Table = pack_dataset(datasets.Dataset(rows), data.max_length, strategy=strategy).data.table
    if strategy == "wrapped" and not (is_all and len(table) == 1):
        table = table.filter(pc.equal(pc.list_value_length(table["input_ids"]), data.max_length))
    return table.replace_schema_metadata(None)
