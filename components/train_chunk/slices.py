"""Which files of tokens a chunk needs: the order of `data.order: blocks`, a function of seed, pass and rows per file.

In each pass the files are shuffled and taken in groups of eight, and the rows of a group are shuffled together. So a
chunk reads the files of the groups that its positions lie in, and no others; it knows them before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from components.shared import events, trained
from components.shared.plan import Plan
from components.shared.recipe import Recipe
from components.shared.runs import Run
from components.shared.store import bundles
from components.shared.store.bundles import Manifest
from components.shared.store.cache import NodeCache

if TYPE_CHECKING:
    from datasets import Dataset

GROUP = 8
"""Files whose rows are shuffled together."""
FOLDERS = ("tokenizer", "train", "eval")
"""What training needs of the tokens."""


class Blocks:
    """The order of rows that lie in files.

    Args:
        rows: Rows of each file, in the files' order.
        seed: The run's seed.
    """

    def __init__(self, rows: list[int], seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self.starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def groups(self, epoch: int) -> list[list[int]]:
        """Returns the files of a pass in its order, by groups."""
        files = np.random.RandomState([self.seed, epoch]).permutation(len(self.rows)).tolist()
        return [files[at : at + GROUP] for at in range(0, len(files), GROUP)]

    def order(self, epoch: int) -> Iterator[int]:
        """Yields the numbers of all rows in the order of a pass."""
        for number, files in enumerate(self.groups(epoch)):
            rows = np.concatenate([np.arange(self.starts[file], self.starts[file + 1]) for file in files])
            # The generator of old, as its numbers are the same in every release of NumPy (NEP 19).
            yield from np.random.RandomState([self.seed, epoch, number]).permutation(rows).tolist()

    def touched(self, epoch: int, first: int, last: int) -> set[int]:
        """Returns the files that positions of a pass lie in.

        Args:
            epoch: Number of the pass, from 0.
            first: The first position.
            last: The position behind the last.
        """
        found: set[int] = set()
        at = 0
        for files in self.groups(epoch):
            end = at + sum(self.rows[file] for file in files)
            if at < last and first < end:
                found.update(files)
            at = end
        return found


def needed(blocks: Blocks, recipe: Recipe, steps_per_epoch: int, start: int, target: int) -> set[int]:
    """Returns the files that the steps behind `start` up to `target` need.

    The data loader fetches batches before they are asked for: one, and two for each of its workers. Those are counted
    in, at most to the end of a pass.
    """
    batch = recipe.training.batch_size
    ahead = (1 + 2 * recipe.training.workers) * batch
    found: set[int] = set()
    for epoch in range(start // steps_per_epoch, -(-target // steps_per_epoch)):
        first = max(start - epoch * steps_per_epoch, 0) * batch
        last = min(target - epoch * steps_per_epoch, steps_per_epoch) * batch + ahead
        found |= blocks.touched(epoch, first, min(last, len(blocks)))
    return found


class Tokens:
    """The tokens of a chunk on this machine.

    Args:
        run: The run.
        recipe: Its recipe.
        plan: Its plan.
        place: Returns a folder with room for so many bytes.
        cache: Files this node has already.
    """

    def __init__(
        self, run: Run, recipe: Recipe, plan: Plan, place: Callable[[int], str], cache: NodeCache | None = None
    ) -> None:
        self._run, self._recipe, self._plan = run, recipe, plan
        self._place, self._cache = place, cache
        self._folder: str | None = None
        self._files: list[str] = []
        self._blocks: Blocks | None = None
        self._present: set[int] = set()

    def fetch(self, start: int, target: int) -> str:
        """Brings the files to this machine that the steps from `start` to `target` need; called again, what is missing.

        Returns:
            The folder with tokenizer and rows.

        Raises:
            DamagedError: a file is missing or differs from what was committed.
        """
        prefix, manifest = trained.tokens_manifest(self._run)
        names = self._missing(manifest, start, target)
        num_bytes = sum(manifest.files[name]["size"] for name in names)
        place = self._folder or f"{self._place(num_bytes)}/tokens"
        self._folder = bundles.fetch(self._run.storage, prefix, manifest, place, self._cache, names)
        if self._blocks is not None:
            events.emit("slice", files=len(self._present), of=len(self._files), bytes=num_bytes)
        return self._folder

    def adopt(self, folder: str) -> None:
        """Takes over what another process of this machine has fetched."""
        self._folder = folder

    def train(self) -> Dataset:
        """Opens the training rows that were fetched."""
        import datasets

        from components.train_chunk import sliced

        assert self._folder, "nothing was fetched"
        if self._blocks is None:
            return datasets.load_from_disk(f"{self._folder}/train")
        return sliced.open_files(self._folder, self._files, self._blocks, self._present)

    def _missing(self, manifest: Manifest, start: int, target: int) -> list[str]:
        """Returns the files that are needed and not here, and counts them as here."""
        others = [name for name in manifest.files if name.partition("/")[0] in FOLDERS]
        if self._run.require("tokens.json").get("order") != "blocks":
            return [] if self._folder else others
        files = manifest.meta["files"]["train"]
        self._files = [name for name, _ in files]
        self._blocks = Blocks([rows for _, rows in files], self._recipe.seed)
        wanted = needed(self._blocks, self._recipe, self._plan.steps_per_epoch, start, target) - self._present
        self._present |= wanted
        rest = set() if self._folder else set(others).difference(self._files)
        return [*sorted(rest), *(self._files[number] for number in sorted(wanted))]
