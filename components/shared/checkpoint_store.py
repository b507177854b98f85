"""Checkpoints of a run: committed by manifest, found by step, never trusted without their hashes."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from components.shared.errors import DamagedError
from components.shared.pickles import code_in, may_be_pickle
from components.shared.runs import Run
from components.shared.store import bundles
from components.shared.store.bundles import BundleWriter, Manifest
from components.shared.store.cache import NodeCache

_STEP = re.compile(r"^step-(\d{8,})$")


class CheckpointStore:
    """The checkpoints of one run, `runs/<run>/checkpoints/step-NNNNNNNN/`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.storage = run.storage

    def prefix(self, step: int) -> str:
        """Returns where the checkpoint of a step lies in the store."""
        return self.run.path(f"checkpoints/step-{step:08d}")

    def uri(self, step: int, manifest: Manifest) -> str:
        """Returns the folder that `from_pretrained` and `resume_from_checkpoint` read."""
        return self.storage.uri(manifest.path(self.prefix(step)))

    def steps(self) -> list[int]:
        """Returns the steps under which anything was written, ascending; not all are committed."""
        names = self.storage.list(self.run.path("checkpoints"))
        return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))

    def manifest(self, step: int) -> Manifest | None:
        """Returns what is committed for a step, or None.

        Raises:
            DamagedError: the manifest is unreadable, was marked, or belongs to another run or step.
        """
        manifest = bundles.read_manifest(self.storage, self.prefix(step))
        if manifest is None:
            return None
        found = (manifest.kind, manifest.meta.get("run"), manifest.meta.get("step"))
        if found != ("checkpoint", self.run.name, step) or not isinstance(manifest.meta.get("digest"), str):
            raise DamagedError(f"{self.storage.uri(self.prefix(step))}: its manifest says {found}, not this run's.")
        return manifest

    def committed(self) -> Iterator[tuple[int, Manifest | DamagedError]]:
        """Yields committed checkpoints, newest first; a damaged manifest as the error it gives."""
        for step in reversed(self.steps()):
            try:
                manifest = self.manifest(step)
            except DamagedError as error:
                yield step, error
                continue
            if manifest:
                yield step, manifest

    def is_whole(self, step: int, manifest: Manifest) -> bool:
        """Tells whether all files of a checkpoint are there in full size; cheap, for whoever need not load it."""
        present = self.storage.find(manifest.path(self.prefix(step)))
        return all(name in present and present[name][0] == entry["size"] for name, entry in manifest.files.items())

    def publication(self, step: int, check: Callable[[], None] = lambda: None) -> BundleWriter:
        """Begins an attempt at a checkpoint; see `bundles.BundleWriter`."""
        return BundleWriter(self.storage, self.prefix(step), kind="checkpoint", check=check)

    def commit(self, step: int, publication: BundleWriter, meta: dict[str, Any]) -> tuple[Manifest, bool]:
        """Commits what was sent; see `bundles.BundleWriter.commit`."""
        return publication.commit({"run": self.run.name, "step": step, **meta})

    def fetch(self, step: int, manifest: Manifest, local_dir: str, cache: NodeCache | None = None) -> str:
        """Brings a checkpoint to this machine; see `bundles.fetch`."""
        return bundles.fetch(self.storage, self.prefix(step), manifest, local_dir, cache)

    def verify(self, step: int, manifest: Manifest) -> list[str]:
        """Reads a checkpoint back; see `bundles.verify`."""
        return bundles.verify(self.storage, self.prefix(step), manifest)

    def code(self, step: int, manifest: Manifest) -> list[str]:
        """Returns a line for each pickle of a whole checkpoint that holds code; see `pickles.code_in`."""
        with tempfile.TemporaryDirectory(prefix="baton-pickles-") as folder:
            for name in manifest.files:
                if may_be_pickle(name):
                    self.storage.download(manifest.path(self.prefix(step), name), os.path.join(folder, name))
            return code_in(folder)

    def history(self, step: int, manifest: Manifest) -> list[dict[str, Any]]:
        """Returns the logged values of the run up to a checkpoint, from its `trainer_state.json`."""
        state = json.loads(self.storage.read(manifest.path(self.prefix(step), "trainer_state.json")))
        history: list[dict[str, Any]] = state["log_history"]
        return history

    def evaluation_losses(self, step: int, manifest: Manifest) -> dict[int, float]:
        """Returns the evaluation losses of the run up to a checkpoint that are numbers, by step."""
        history = self.history(step, manifest)
        found = {entry["step"]: entry["eval_loss"] for entry in history if entry.get("eval_loss") is not None}
        return {step: loss for step, loss in found.items() if math.isfinite(loss)}

    def proven_chunks(self) -> set[int]:
        """Returns the numbers of the chunks whose checkpoint the checkpoint stage has read back."""
        names = self.storage.list(self.run.path("proof"))
        return {int(match[1]) for name in names if (match := re.fullmatch(r"chunk-(\d+)\.json", name))}

    def verified_step(self) -> int:
        """Returns the newest step that the checkpoint stage has read back and found whole, 0 before there is one."""
        promoted = self.run.get("promoted.json")
        return int(promoted["newest"]["step"]) if promoted else 0
