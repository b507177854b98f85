"""The first rank's part in the checkpoints of a chunk: it commits them, from a thread beside training."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator

from baton.components.shared.checkpoints import retention
from baton.components.shared.checkpoints.store import Checkpoint
from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError, ExactnessError
from baton.components.shared.core.state import Phase
from baton.components.shared.store.bundles import BundleWriter
from baton.components.shared.store.cache import NodeCache
from baton.components.train_chunk.checkpointing.collective import CollectiveCheckpointManager, Decision, Files, Services
from baton.components.train_chunk.checkpointing.committer import Committer, Snapshot
from baton.components.train_chunk.checkpointing.lineage import Capture, Lineage
from baton.components.train_chunk.checkpointing.restore import Restored, committed_at_target
from baton.components.train_chunk.reporting.accounting import Accounting
from baton.components.train_chunk.trainer.base import ChunkTrainer, Place

logger = logging.getLogger("baton")

LAST_MOMENT = 30.0
"""Seconds for which a chunk that failed waits for the checkpoint it had on its way."""
SOON = 5.0
"""Seconds for which one request of a commit is tried again before the commit counts as failing."""


class CheckpointManager(CollectiveCheckpointManager):
    """Takes complete checkpoints, uploads and commits them, and applies retention.

    Args:
        services: What the rank works with.
        trainer: The chunk's trainer.
        restored: The checkpoint it resumes from.
        lineage: What its checkpoints come after.
        accounting: What the attempt costs.
        cache: Where this node keeps files of checkpoints.

    Attributes:
        overtaken: Whether another process has committed the target.
        finished: Whether early stopping has ended the run.
    """

    def __init__(
        self,
        services: Services,
        trainer: ChunkTrainer,
        restored: Restored | None,
        *,
        lineage: Lineage,
        accounting: Accounting,
        cache: NodeCache | None,
    ) -> None:
        super().__init__(services)
        chunks = self._context.recipe.chunks
        self._trainer = trainer
        self._cache = cache
        self._restored_folder = restored.folder if restored else None
        self.lineage = lineage
        self.accounting = accounting
        self.overtaken = restored is not None and restored.is_target
        self.finished = False
        self._told: str | None = None
        self._waits = chunks.wait_for_commit
        self._committer = Committer(self._context.store, self._on_commit, max_unsaved=chunks.max_unsaved_seconds)
        self._writing: BundleWriter | None = None
        self._stall_began = 0.0
        self._saved_at = time.monotonic()
        self._patience = self._context.run.storage.patience

    @property
    def notice(self) -> str | None:
        """Why the chunk is to leave: this machine's notice, or another's of those that train together."""
        return self._watch.notice or self._told

    def on_first_step(self) -> None:
        """Notes that training begins."""
        self._context.clock.enter(Phase.TRAIN)
        self._saved_at = time.monotonic()
        if self._restored_folder:
            self._staging.drop(self._restored_folder)  # one copy in memory, not two
        self.accounting.progress.start(self.lineage.start_step)
        # A checkpoint that does not get through is to be noticed soon; `Committer` has the patience.
        self._context.run.storage.patience = min(self._patience, SOON)

    def finish(self) -> None:
        """Waits until the last checkpoint is committed."""
        self._context.clock.enter(Phase.UPLOAD)
        self._committer.finish()
        self._context.run.storage.patience = self._patience

    def close(self) -> None:
        """Ends what runs beside training; a checkpoint on its way has a moment to arrive."""
        self._committer.abandon(LAST_MOMENT)
        self.accounting.progress.end()

    def live(self) -> dict[str, float]:
        """Returns how far the chunk is now, by the names in `reporting.sinks.prometheus.LIVE`."""
        work = self.accounting.work(self._context.clock.trained())
        return {
            "step": self._trainer.state.global_step,
            "target_step": self._context.target,
            "checkpoint_step": self.lineage.reached,
            "unsaved_seconds": time.monotonic() - self._saved_at,
            "goodput": work.goodput,
            "lost_steps": work.lost_steps,
            "restarts": work.restarts,
        }

    def _judge(self, is_late: bool) -> Decision:
        self.accounting.progress.step = self._trainer.state.global_step
        self._committer.raise_failure()
        return Decision(self.overtaken, is_late, self._waits or self._committer.is_free)

    def _hear(self, notices: list[str | None]) -> None:
        self._told = next((notice for notice in notices if notice), self._told)

    def _places_here(self, num_bytes: int) -> Iterator[Place]:
        step = self._trainer.state.global_step
        self._context.clock.enter(Phase.SAVE, step=step)
        self._stall_began = time.monotonic()
        self._committer.make_way()  # before anything is written: two checkpoints may not fit in memory
        self._committer.raise_failure()
        for place in super()._places_here(num_bytes):
            self._writing = self._context.store.open_writer(step) if place.send else None
            yield place

    def _send_off(self, folder: str) -> None:
        assert self._writing
        # Part of the attempt that `_take` hands on: the manifest names these files too.
        self._writing.send(folder)
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))

    def _writer(self, step: int) -> BundleWriter:
        self._writing = self._writing or super()._writer(step)
        return self._writing

    def _add_files(self, step: int, files: Files) -> None:
        self._writer(step).files.update(files)

    def _take(self, capture: Capture) -> None:
        every = self._context.recipe.chunks.keep.every
        self.finished = capture.finished
        trained_for = self._context.clock.seconds.get(Phase.TRAIN, 0.0)
        snapshot = Snapshot(
            capture.step,
            capture.folder,
            capture.digests,
            lambda: self.lineage.meta(capture, self.accounting.work(trained_for)),
            writer=self._writing,
            wanted=capture.wanted or bool(every and capture.step % every == 0),
        )
        if self.overtaken:
            shutil.rmtree(capture.folder, ignore_errors=True)
        else:
            self._committer.submit(snapshot)
            if self._waits or self._writing:  # sent in parts: there is no room for another one meanwhile
                self._committer.finish()
        self.accounting.stalls.append(time.monotonic() - self._stall_began)
        self._context.clock.enter(Phase.TRAIN)

    def _on_commit(self, snapshot: Snapshot, checkpoint: Checkpoint, ours: bool, seconds: dict[str, float]) -> None:
        """Notes a commit, in the thread beside training."""
        step, digest = checkpoint.step, checkpoint.digest
        if not ours:
            self._require_same_state(checkpoint, snapshot.digests["state"])
        # Only this thread commits, one checkpoint at a time: the next one's manifest names this one as its parent.
        if self.lineage.reached <= step:
            self.lineage.parent = checkpoint
        self._saved_at = time.monotonic()
        uri = self._context.store.uri(checkpoint)
        events.emit(events.Checkpoint(step=step, uri=uri, digest=digest, bytes=checkpoint.bytes, seconds=seconds))
        # Before the staged folder goes: the files are linked, or copied from memory, and the next pod here need not
        # fetch them.
        if ours and self._cache and not self._context.run.storage.is_local:
            for name, entry in checkpoint.manifest.files.items():
                self._cache.keep(entry["sha256"], os.path.join(snapshot.folder, name))
        if step < self._context.target:  # at the target the checkpoint stage does it, once all is proven
            context = self._context
            try:  # failing in it is no reason to stop
                # Another process may train the same chunk, such as a pod that was thought gone; both are right.
                self.overtaken = committed_at_target(context.store, context.target) is not None
            except (BatonError, FileNotFoundError) as error:
                logger.warning("another process at the same chunk was not looked for: %s", error)
            keep, in_use = context.recipe.chunks.keep, self.lineage.start_step
            retention.tidy(context.store, keep, targets=context.plan.targets, in_use=in_use)

    def _require_same_state(self, theirs: Checkpoint, digest: str) -> None:
        """Compares a checkpoint that another process committed first with the one this process made."""
        if theirs.digest != digest:
            raise ExactnessError(
                f"another process committed step {theirs.step} with digest {theirs.digest[:12]}…, this one has "
                f"{digest[:12]}…; this one stops.",
                remedy="Give each run its own name; if this is one run, the hardware differs.",
            )
        logger.warning("another process committed step %d first, with the same state; training continues", theirs.step)
