"""Checkpoints of a chunk: agreed between ranks, written by all, committed by the first from a thread.

`Lineage` is the chain of states that the chunk continues; the manifests record it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton import events
from baton.checkpoint import retention
from baton.checkpoint.commit import Committer, PendingCheckpoint
from baton.checkpoint.manifest import CheckpointMeta, Parent, Restoration
from baton.checkpoint.restore import Restored, committed_at_target
from baton.checkpoint.signatures import manifest_digest
from baton.checkpoint.staging import Staging
from baton.checkpoint.store import Checkpoint
from baton.errors import BatonError, ExactnessError
from baton.runs.documents import OwnState, RunCost, StagePhase, Transfer
from baton.runs.run import now
from baton.runs.versions import CHECKPOINT_FORMATS, Fingerprint, FormatVersions
from baton.store.bundle import BundleWriter
from baton.store.cache import NodeCache
from baton.store.manifest import FileEntry
from baton.train.context import TrainContext
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.distributed.watchdog import NullWatchdog
from baton.train.metrics.accounting import Accounting
from baton.train.protocol import ChunkTrainer, StagingFolder

# --- The chain of states that a chunk continues: what the manifests of its checkpoints say besides their files.


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A checkpoint as the trainer has written it.

    Attributes:
        step: The step at whose end it was captured.
        folder: Local folder with its files.
        digests: Digests of the state in memory, those of all ranks joined.
        wanted: Whether it is not given up for a newer one.
        finished: Whether early stopping ends the run here.
        checked: What was compared after the restore, part by part.
        trainable_parameters: How many parameters training changes.
        skips: Steps up to it that were skipped.
        hooks: State of the user's code.
    """

    step: int
    folder: str
    digests: dict[str, str]
    wanted: bool
    finished: bool
    checked: dict[str, str]
    trainable_parameters: int
    skips: tuple[int, ...] = ()
    hooks: OwnState = field(default_factory=OwnState)


class Lineage:
    """The checkpoints that those of a chunk come after.

    Args:
        context: The chunk.
        restored: The checkpoint it resumes from.
        level: How exactly; see `attempt.adapt_machine`.
        skipped: Why newer checkpoints were passed over.

    Attributes:
        start_step: Step at which the chunk began.
        parent: The newest checkpoint of this run that this process restored or committed.
    """

    def __init__(self, context: TrainContext, restored: Restored | None, level: str, skipped: list[str]) -> None:
        self._context = context
        self._level, self._skipped = level, skipped
        self._looked = restored is None or restored.meta.hooks is not None
        parallel = context.recipe.parallel
        self._fingerprint = Fingerprint.here(context.ranks.size, parallel.strategy, parallel.virtual_workers)
        self.start_step = restored.step if restored else 0
        self.parent: Checkpoint | None = restored.checkpoint if restored else None

    @property
    def reached(self) -> int:
        """The step of the newest checkpoint."""
        return self.parent.step if self.parent else 0

    def meta(self, capture: Capture, work: RunCost) -> CheckpointMeta:
        """Returns what the manifest of a checkpoint says besides its files."""
        # Read as the commit is made, and not at the capture: only then is it known which checkpoint was committed
        # before this one.
        parent, context = self.parent, self._context
        digest = capture.digests["state"]
        storage = context.run.storage
        # An older Baton's checkpoint lacks what changes here: whether it had changed before, nobody knows.
        unknown = not self._looked and (capture.hooks.carried or capture.hooks.lost)
        meta = CheckpointMeta(
            digest=digest,
            state=capture.digests,
            parent=self._as_parent(parent) if parent else None,
            chain=hashlib.sha256(f"{parent.meta.chain if parent else ''}{digest}".encode()).hexdigest(),
            restored=Restoration(
                step=self.start_step,
                checked=capture.checked or None,
                level="consistent" if unknown else self._level,
                skipped=self._skipped,
            ),
            identity=context.identity,
            finished=capture.finished,
            fingerprint=self._fingerprint,
            trainable_parameters=capture.trainable_parameters,
            hooks=capture.hooks,
            chunk=context.index,
            created=now(),
            seconds=context.clock.split(),
            moved=Transfer(sent=storage.sent, received=storage.received),
            work=work,
            made=FormatVersions.here(CHECKPOINT_FORMATS),
        )
        return meta.model_copy(update={"skips": list(capture.skips)}) if capture.skips else meta

    def _as_parent(self, parent: Checkpoint) -> Parent:
        """Returns what a checkpoint knows its parent by: where they are signed, by all that its manifest says."""
        known = Parent(step=parent.step, digest=parent.digest)
        if self._context.store.signed_by is None:
            return known
        return known.model_copy(update={"manifest": manifest_digest(parent.manifest)})


# --- Collective checkpoints: ranks agree on one, find room for it, and wait until all have written.


Files = dict[str, FileEntry]
"""Name → size and SHA-256 of files that were sent."""


@dataclass(frozen=True)
class Decision:
    """The ranks' common decision after a step.

    Attributes:
        leave: Whether to save and end the chunk here.
        is_late: Whether a checkpoint is due by time.
        is_free: Whether one captured now would be sent at once.
        figures: What each rank had to tell of the step.
    """

    leave: bool = False
    is_late: bool = False
    is_free: bool = False
    figures: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, kw_only=True)
class Services:
    """What a rank works with.

    Attributes:
        context: The chunk.
        staging: Where checkpoints are written.
        watch: Tells that this machine will be preempted.
        watchdog: Signs of life.
    """

    context: TrainContext
    staging: Staging
    watch: PreemptionWatch
    watchdog: NullWatchdog


class Checkpointer:
    """The part of one rank in the checkpoints of a chunk. The first rank's is a `CheckpointManager`, which commits.

    All ranks call the same methods in the same order: each gathers. A world of one rank agrees with itself.

    Args:
        services: What the rank works with.
    """

    def __init__(self, services: Services) -> None:
        self._context = services.context
        self._staging = services.staging
        self._watch = services.watch
        self._watchdog = services.watchdog
        self._ranks = services.context.ranks

    def on_first_step(self) -> None:
        """Notes that training begins."""

    def agree(self, is_late: bool, figures: Sequence[float] = ()) -> Decision:
        """Decides for all after each step. Any machine's notice of preemption counts, all else the first rank's word.

        Args:
            is_late: Whether a checkpoint is due by time.
            figures: What this rank has to tell of the step, as many as each.

        Raises:
            BatonError: in the first rank, what went wrong in the background.
        """
        ours = self._judge(is_late)
        leave = ours.leave or self._watch.notice is not None
        numbers = [leave, ours.is_late, ours.is_free, *figures]
        # One gather a step for all that the ranks must agree on.
        rows = self._ranks.gather_numbers([float(number) for number in numbers])
        # What is due by time is the first rank's word: clocks differ, and all must save at the same step.
        told = [row[3:] for row in rows] if figures else ()
        decision = Decision(any(row[0] for row in rows), bool(rows[0][1]), bool(rows[0][2]), told)
        if decision.leave:  # the same in all ranks, so that all gather once more or none does
            self._hear(self._ranks.gather(self._watch.notice))
        return decision

    def leaves_at_once(self) -> bool:
        """Tells whether some machine is to be preempted before training begins."""
        notices = self._ranks.gather(self._watch.notice)
        self._hear(notices)
        return any(notices)

    def places(self, num_bytes: int) -> Iterator[StagingFolder]:
        """Yields folders to write a checkpoint to: one of each machine, the same for its ranks."""
        self._watchdog.beat("checkpoint")
        ours = self._places_here(num_bytes)
        with self._watchdog.excused():  # the checkpoint before may be on its way
            place = self._ranks.on_node_leaders(lambda: self._next(ours))
        while place:
            yield place
            # Comes back here only where some rank ran out of room: then all try the next place together.
            place = self._ranks.on_node_leaders(lambda: self._next(ours))

    def save(self, capture: Capture) -> None:
        """Takes a complete checkpoint: all ranks have written their part.

        Returns once the first rank has taken it, so that no rank trains on while it may still fail.
        """
        with self._watchdog.excused():
            self._join_nodes(capture.step, capture.folder)
            self._take(capture)
            self._ranks.gather(None)

    def finish(self) -> None:
        """Waits until the last checkpoint is committed."""

    def close(self) -> None:
        """Ends what runs beside training; a checkpoint on its way has a moment to arrive."""

    def _judge(self, is_late: bool) -> Decision:
        """Returns what this rank knows that the others do not; see `agree`."""
        return Decision()

    def _take(self, capture: Capture) -> None:
        """Sends a complete checkpoint on its way."""

    def _hear(self, notices: list[str | None]) -> None:
        """Notes why some machine is to be preempted."""

    def _add_files(self, step: int, files: Files) -> None:
        """Adds what another machine has sent to the checkpoint that is being written."""

    def _writer(self, step: int) -> BundleWriter:
        """Returns the attempt at the checkpoint that is being written."""
        return self._context.store.open_writer(step)

    def _send_off(self, folder: str) -> None:
        """Sends the files of a folder and removes them."""
        raise NotImplementedError("a checkpoint of several ranks fits its folder, see `_next`")

    def _places_here(self, num_bytes: int) -> Iterator[StagingFolder]:
        if self._ranks.leads_node:
            for folder, fits in self._staging.places(num_bytes):
                yield StagingFolder(folder, None if fits else self._send_off)

    def _next(self, places: Iterator[StagingFolder]) -> StagingFolder | None:
        place = next(places, None)
        if place and place.send and self._ranks.size > 1:
            raise BatonError(
                "there is no room to stage a checkpoint, neither in memory nor on disk, and several processes cannot "
                "send theirs file by file.",
                remedy="Give the pod more resources.shm, or a larger disk for its temporary files.",
            )
        return place

    def _join_nodes(self, step: int, folder: str) -> None:
        """Sends what other machines have written, as part of the first one's attempt; that commits it all."""
        if self._ranks.nodes == 1:
            return
        # All machines write into the first one's folder, whose manifest names their files: one commit, or none.
        attempt = self._ranks.on_first(lambda: self._writer(step).folder)
        part = self._context.store.open_writer(step)
        part.folder = attempt
        if self._ranks.leads_node and self._ranks.node and os.path.isdir(folder):  # with virtual workers it has no part
            part.send(folder)
        # After each machine has sent its files: the first one then commits what is in the store, and nothing else.
        for files in self._ranks.gather(part.files):
            self._add_files(step, files)


# --- The first rank's part in the checkpoints of a chunk: it commits them, from a thread beside training.


logger = logging.getLogger("baton")

LAST_MOMENT = 30.0
"""Seconds for which a chunk that failed waits for the checkpoint it had on its way."""
SOON = 5.0
"""Seconds for which one request of a commit is tried again before the commit counts as failing."""


class CheckpointManager(Checkpointer):
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
        self._context.clock.enter(StagePhase.TRAIN)
        self._saved_at = time.monotonic()
        if self._restored_folder:
            self._staging.drop(self._restored_folder)  # one copy in memory, not two
        self.accounting.progress.start(self.lineage.start_step)
        # A checkpoint that does not get through is to be noticed soon; `Committer` has the patience.
        self._context.run.storage.patience = min(self._patience, SOON)

    def finish(self) -> None:
        """Waits until the last checkpoint is committed."""
        self._context.clock.enter(StagePhase.UPLOAD)
        self._committer.finish()
        self._context.run.storage.patience = self._patience

    def close(self) -> None:
        """Ends what runs beside training; a checkpoint on its way has a moment to arrive."""
        self._committer.abandon(LAST_MOMENT)
        self.accounting.progress.end()

    def live(self) -> dict[str, float]:
        """Returns how far the chunk is now, by the names in `metrics.sinks.LIVE_GAUGES`."""
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

    def _places_here(self, num_bytes: int) -> Iterator[StagingFolder]:
        step = self._trainer.state.global_step
        self._context.clock.enter(StagePhase.SAVE, step=step)
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
        trained_for = self._context.clock.seconds.get(StagePhase.TRAIN, 0.0)
        snapshot = PendingCheckpoint(
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
        self._context.clock.enter(StagePhase.TRAIN)

    def _on_commit(
        self, snapshot: PendingCheckpoint, checkpoint: Checkpoint, ours: bool, seconds: dict[str, float]
    ) -> None:
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
