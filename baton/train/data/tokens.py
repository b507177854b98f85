"""The tokens of a chunk on this machine: downloaded as far as its steps need them, and opened as a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton import events
from baton.models import train_rows, trained
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokensMeta
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store import bundle
from baton.store.cache import NodeCache
from baton.store.manifest import Manifest
from baton.train.data.slices import Blocks, needed_files

if TYPE_CHECKING:
    from datasets import Dataset

FOLDERS = ("tokenizer", "train", "eval")


class ChunkTokens:
    """`place` returns a folder with room for so many bytes."""

    def __init__(
        self, run: Run, recipe: Recipe, plan: Plan, place: Callable[[int], str], cache: NodeCache | None = None
    ) -> None:
        self._run, self._recipe, self._plan = run, recipe, plan
        self._place, self._cache = place, cache
        self._folder: str | None = None
        self._files: list[str] = []
        self._blocks: Blocks | None = None
        self._present: set[int] = set()

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
        if self._blocks is not None:
            events.emit(events.Slice(files=len(self._present), of=len(self._files), bytes=num_bytes))
        return self._folder

    def adopt(self, folder: str) -> None:
        """Uses another process's download on this machine."""
        self._folder = folder

    def train(self) -> Dataset:
        from baton.train.data import samplers

        if self._blocks is None:
            return trained.open_rows(f"{self.folder}/train")
        return train_rows.readable(samplers.open_files(self.folder, self._files, self._blocks, self._present))

    def held_out(self) -> Dataset:
        return trained.open_rows(f"{self.folder}/eval")

    def _missing(self, manifest: Manifest, start: int, target: int) -> list[str]:
        """Returns needed files that are not here, and counts them as here."""
        others = [name for name in manifest.files if name.partition("/")[0] in FOLDERS]
        if self._run.require("tokens.json").get("order") != "blocks":
            return [] if self._folder else others
        files = TokensMeta.read(manifest.meta, self._run.uri).files["train"]
        self._files = [name for name, _ in files]
        self._blocks = Blocks([rows for _, rows in files], self._recipe.seed)
        wanted = needed_files(self._blocks, self._recipe, self._plan.steps_per_epoch, start, target) - self._present
        self._present |= wanted
        rest = set() if self._folder else set(others).difference(self._files)
        return [*sorted(rest), *(self._files[number] for number in sorted(wanted))]
