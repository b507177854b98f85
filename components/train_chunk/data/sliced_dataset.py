"""A dataset of all rows of a run, of which only those of some files are on this machine."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.table import InMemoryTable, MemoryMappedTable, concat_tables

from baton.components.shared.core.errors import BatonError
from baton.components.train_chunk.data.slices import Blocks

Row = dict[str, object]


class Sliced(Dataset):
    """Rows by their numbers in the whole; a batch with one that is not here is refused.

    Iterated over, as trainers iterate to see the first row's columns, it has some row that is here in the place of each
    that is not.

    Attributes:
        blocks: Which row lies in which file.
        present: For each file, whether it is here.
    """

    blocks: Blocks
    present: np.ndarray

    def __getitems__(self, keys: list[int]) -> list[Row]:
        """Returns the rows of a batch.

        Raises:
            BatonError: one of them is in a file that was not fetched: the order of rows is not that of the slice.
        """
        files = np.searchsorted(self.blocks.starts, np.asarray(keys), side="right") - 1
        if not self.present[files].all():
            row = keys[int(np.argmin(self.present[files]))]
            raise BatonError(f"row {row} of the training data is asked for, and its file was not fetched.")
        return list(super().__getitems__(keys))


def open_files(folder: str, files: list[str], blocks: Blocks, present: set[int]) -> Sliced:
    """Opens the files of a slice.

    Args:
        folder: Where they lie.
        files: The names of all files, in the order of `blocks`.
        blocks: Rows of each file.
        present: Numbers of the files that are here, at least one.
    """
    here = sorted(present)
    table = concat_tables([MemoryMappedTable.from_file(f"{folder}/{files[number]}") for number in here])
    # Rows that are not here keep 0, the first one that is: enough to see the columns, and never handed out in a batch.
    place = np.zeros(len(blocks), dtype=np.uint64)
    at = 0
    for number in here:
        place[blocks.starts[number] : blocks.starts[number + 1]] = np.arange(at, at + blocks.rows[number])
        at += blocks.rows[number]
    rows = Sliced(
        table, indices_table=InMemoryTable.from_pydict({"indices": pa.array(place)}), fingerprint=f"slice-{here}"
    )
    rows.blocks = blocks
    rows.present = np.isin(np.arange(len(files)), here)
    return rows
