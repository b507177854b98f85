"""The tokens of a chunk on this machine: the files that its steps need, downloaded.

By `data.order: blocks`, each pass shuffles the files, takes them in groups of eight, and shuffles the rows of a group
together: a function of seed, pass and rows per file. So a chunk reads only the files of its positions' groups; it knows
them before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from baton import events
from baton.models import trained
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokensMeta
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store import bundle
from baton.store.cache import NodeCache
from baton.store.manifest import Manifest

if TYPE_CHECKING:
    from datasets import Dataset

FOLDERS = ("tokenizer", "train", "eval")
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


class ChunkTokens:
    """`place` returns a folder with room for so many bytes."""

    def __init__(
        self, run: Run, recipe: Recipe, plan: Plan, place: Callable[[int], str], cache: NodeCache | None = None
    ) -> None:
        self._run, self._recipe, self._plan = run, recipe, plan
        self._place, self._cache = place, cache
        self._folder: str | None = None
        self.files: list[str] = []
        self.blocks: Blocks | None = None
        self.present: set[int] = set()

    @property
    def folder(self) -> str:
        assert self._folder, "nothing was fetched"
        return self._folder

    def fetch(self, start: int, target: int) -> str:
        """Downloads the tokens of the steps from `start` to `target`; called again, those still missing."""
        prefix, manifest = trained.tokens_manifest(self._run)
        names = self._missing(manifest, start, target)
        num_bytes = sum(manifest.files[name]["size"] for name in names)
        place = self._folder or f"{self._place(num_bytes)}/tokens"
        self._folder = bundle.fetch(self._run.storage, prefix, manifest, place, self._cache, names)
        if self.blocks is not None:
            events.emit(events.Slice(files=len(self.present), of=len(self.files), bytes=num_bytes))
        return self._folder

    def adopt(self, folder: str) -> None:
        """Uses another process's download on this machine."""
        self._folder = folder

    def held_out(self) -> Dataset:
        return trained.open_rows(f"{self.folder}/eval")

    def _missing(self, manifest: Manifest, start: int, target: int) -> list[str]:
        """Returns needed files that are not here, and counts them as here."""
        others = [name for name in manifest.files if name.partition("/")[0] in FOLDERS]
        if self._run.require("tokens.json").get("order") != "blocks":
            return [] if self._folder else others
        files = TokensMeta.read(manifest.meta, self._run.uri).files["train"]
        self.files = [name for name, _ in files]
        self.blocks = Blocks([rows for _, rows in files], self._recipe.seed)
        wanted = needed_files(self.blocks, self._recipe, self._plan.steps_per_epoch, start, target) - self.present
        self.present |= wanted
        rest = set() if self._folder else set(others).difference(self.files)
        return [*sorted(rest), *(self.files[number] for number in sorted(wanted))]
