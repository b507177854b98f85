"""Checkpoints of a run: committed by manifest, found by step, never trusted without their hashes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from components.shared import bundles
from components.shared.bundles import Manifest
from components.shared.errors import DamagedError
from components.shared.runs import Run

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
        """Tells whether all files of a checkpoint are there; cheap, for whoever need not load it."""
        present = set(self.storage.list(manifest.path(self.prefix(step))))
        return {name.split("/", 1)[0] for name in manifest.files} <= present

    def commit(
        self,
        step: int,
        local_dir: str,
        meta: dict[str, Any],
        before_commit: Callable[[], None] = lambda: None,
    ) -> tuple[Manifest, bool]:
        """Uploads a checkpoint folder and commits it; see `bundles.publish`."""
        meta = {"run": self.run.name, "step": step, **meta}
        return bundles.publish(
            self.storage,
            self.prefix(step),
            local_dir,
            kind="checkpoint",
            meta=meta,
            before_commit=before_commit,
        )

    def fetch(self, step: int, manifest: Manifest, local_dir: str) -> str:
        """Brings a checkpoint to this machine; see `bundles.fetch`."""
        return bundles.fetch(self.storage, self.prefix(step), manifest, local_dir)

    def verify(self, step: int, manifest: Manifest) -> list[str]:
        """Reads a checkpoint back; see `bundles.verify`."""
        return bundles.verify(self.storage, self.prefix(step), manifest)

    def history(self, step: int, manifest: Manifest) -> list[dict[str, Any]]:
        """Returns the logged values of the run up to a checkpoint, from its `trainer_state.json`."""
        state = json.loads(self.storage.read(manifest.path(self.prefix(step), "trainer_state.json")))
        history: list[dict[str, Any]] = state["log_history"]
        return history
