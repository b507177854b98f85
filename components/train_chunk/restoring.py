"""Which checkpoint a chunk goes on from: the newest whose every byte is as committed, and that holds no code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from components.shared import events
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import DamagedError, ExactnessError
from components.shared.pickles import code_in
from components.shared.store import bundles
from components.shared.store.bundles import Manifest
from components.shared.store.cache import NodeCache

logger = logging.getLogger("baton")


@dataclass(frozen=True)
class Restored:
    """A checkpoint brought to this machine.

    Attributes:
        step: Its step.
        manifest: What was committed.
        folder: Local folder of its files.
        stands: Whether there is nothing to train behind it for this chunk, which lacks its score alone.
    """

    step: int
    manifest: Manifest
    folder: str
    stands: bool = False


@dataclass(frozen=True)
class Fetched:
    """What training needs, on this machine.

    Attributes:
        restored: The checkpoint to go on from, None at the start of a run.
        tokens: Folder of the tokenized rows and the tokenizer.
        base: Folder of the base model, None for a model from scratch.
        code: Folder of the user's Python files, None where there are none.
    """

    restored: Restored | None
    tokens: str
    base: str | None
    code: str | None


class Restorer:
    """Finds and fetches checkpoints.

    Args:
        store: The run's checkpoints.
        target: Step the chunk trains to.
        identity: What a checkpoint must have been made from.
        cache: Files this node has already.

    Attributes:
        skipped: Why checkpoints were passed over.
    """

    def __init__(self, store: CheckpointStore, target: int, identity: str, cache: NodeCache | None) -> None:
        self.store = store
        self.target = target
        self.identity = identity
        self.cache = cache
        self.skipped: list[str] = []
        self._skipped_steps: set[int] = set()

    def standing(self) -> tuple[int, Manifest] | None:
        """Returns a committed checkpoint at the target or beyond, or one that ended the run, if its files are there."""
        for step, manifest in self.store.committed():
            if not self._stands(step, manifest):
                return None
            if isinstance(manifest, Manifest) and self.store.is_whole(step, manifest):
                return step, manifest
        return None

    def fetch(self, folder: Callable[[int], str], *, to_score: bool = False) -> Restored | None:
        """Fetches the newest checkpoint before the target that is as committed, None where there is none.

        Args:
            folder: Returns a folder with room for so many bytes.
            to_score: One at the target or beyond will do too.

        Raises:
            ExactnessError: a checkpoint was made from something else.
        """
        for step, manifest in self.store.committed():
            if step >= self.target and not to_score:
                continue
            try:
                if isinstance(manifest, DamagedError):
                    raise manifest
                self._require_same(step, manifest)
                path = os.path.join(folder(manifest.bytes), f"from-{step}")
                fetched = self.store.fetch(step, manifest, path, self.cache)
                return Restored(step, manifest, fetched, stands=to_score and self._stands(step, manifest))
            except DamagedError as error:
                self._skip(step, error)
        return None

    def require_no_code(self, restored: Restored | None, folder: Callable[[int], str]) -> Restored | None:
        """Returns what was fetched, or the newest checkpoint before it whose pickles hold nothing but data."""
        while restored:
            found = code_in(restored.folder)
            if not found:
                return restored
            prefix = self.store.prefix(restored.step)
            try:
                bundles.require_whole(self.store.storage, prefix, restored.manifest, found)
            except DamagedError as error:
                self._skip(restored.step, error)
            restored = self.fetch(folder)
        return None

    def _stands(self, step: int, manifest: Manifest | DamagedError) -> bool:
        """Tells whether a checkpoint is at the target or beyond, or has ended the run."""
        return step >= self.target or (isinstance(manifest, Manifest) and bool(manifest.meta.get("finished")))

    def _skip(self, step: int, error: DamagedError) -> None:
        logger.warning("checkpoint of step %d is not used: %s", step, error)
        events.emit("skipped", step=step, reason=str(error))
        if step not in self._skipped_steps:
            self._skipped_steps.add(step)
            self.skipped.append(str(error))

    def _require_same(self, step: int, manifest: Manifest) -> None:
        if manifest.meta.get("identity") != self.identity:
            raise ExactnessError(
                f"the checkpoint of step {step} was made from another recipe, data, model or plan.",
                remedy="Start a run under another name.",
            )
