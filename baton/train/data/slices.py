"""A chunk's files of tokens: the order of `data.order: blocks`, a function of seed, pass and rows per file.

In each pass the files are shuffled and taken in groups of eight, and the rows of a group are shuffled together. So a
chunk reads only the files of its positions' groups; it knows them before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.recipe.recipe import Recipe

GROUP = 8  # files whose rows are shuffled together


class Blocks:
    def __init__(self, rows: list[int], seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def groups(self, epoch: int) -> list[list[int]]:
        files = np.random.RandomState([self.seed, epoch]).permutation(len(self.rows)).tolist()
        return [files[at : at + GROUP] for at in range(0, len(files), GROUP)]

    def order(self, epoch: int) -> Iterator[int]:
        for number, files in enumerate(self.groups(epoch)):
            rows = np.concatenate([np.arange(self.starts[file], self.starts[file + 1]) for file in files])
            # The legacy generator, as its numbers are the same in every release of NumPy (NEP 19).
            yield from np.random.RandomState([self.seed, epoch, number]).permutation(rows).tolist()

    def touched(self, epoch: int, first: int, last: int) -> set[int]:
        """Returns the files of the positions of a pass from `first` up to `last`, exclusive."""
        touched: set[int] = set()
        at = 0
        for files in self.groups(epoch):
            end = at + sum(self.rows[file] for file in files)
            if at < last and first < end:
                touched.update(files)
            at = end
        return touched


def needed_files(blocks: Blocks, recipe: Recipe, steps_per_epoch: int, start: int, target: int) -> set[int]:
    batch = recipe.training.batch_size
    # The data loader fetches ahead: one batch, and two for each of its workers, at most to the end of a pass.
    ahead = (1 + 2 * recipe.training.workers) * batch
    files: set[int] = set()
    for epoch in range(start // steps_per_epoch, -(-target // steps_per_epoch)):
        first = max(start - epoch * steps_per_epoch, 0) * batch
        last = min(target - epoch * steps_per_epoch, steps_per_epoch) * batch + ahead
        files |= blocks.touched(epoch, first, min(last, len(blocks)))
    return files
