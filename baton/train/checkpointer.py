"""Checkpoints of a chunk: agreed between ranks, written by all, committed by the first from a thread beside training.

Every rank has a `Checkpointer`; the first one's has a `Committer`, which knows the chain of states that the chunk
continues and sends what is staged through an `Uploader`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from baton import events
from baton.checkpoint import retention
from baton.checkpoint.restore import FetchedCheckpoint, committed_at_target
from baton.checkpoint.signatures import manifest_digest
from baton.checkpoint.staging import PendingCheckpoint, Staging, SupersededError
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore, Parent
from baton.errors import BatonError, ExactnessError, UnavailableError
from baton.runs.documents import StagePhase, Transfer
from baton.runs.run import now
from baton.runs.versions import CHECKPOINT_FORMATS, Fingerprint, FormatVersions
from baton.runtime import RetryAttempt, Work, backoff, retry
from baton.store.cache import NodeCache
from baton.train.context import TrainContext
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.distributed.watchdog import Watchdog
from baton.train.metrics.accounting import Accounting

logger = logging.getLogger("baton")

PAUSE = 2.0
"""Seconds between two tries while the store takes nothing."""
LAST_MOMENT = 30.0
"""Seconds for which a chunk that failed waits for the checkpoint it had on its way."""
SOON = 5.0
"""Seconds for which one request of a commit is tried again before the commit counts as failing."""

Committed = Callable[[PendingCheckpoint, Checkpoint, bool, dict[str, float]], None]
"""Is called with what was staged, the checkpoint that is committed, whether it is this process's, and the seconds that
upload and commit took."""


class Uploader:
    """Uploads and commits staged checkpoints in its own thread: one at a time; a newer one takes every other's place.

    `committed` is called in that thread; for `max_unsaved` seconds the store may take nothing before the chunk fails.
    """

    def __init__(self, store: CheckpointStore, committed: Committed, *, max_unsaved: float) -> None:
        self._store = store
        self._max_unsaved = max_unsaved
        self._committed = committed
        self._runtime = store.storage.runtime
        self._thread: Work | None = None
        self._newest: PendingCheckpoint | None = None
        self._failure: BaseException | None = None
        self._is_failing = self._made_way = False
        self._saved_at = self._runtime.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether what is staged now would be sent at once: nothing is on its way, or it does not get through."""
        return self._thread is None or not self._thread.is_alive() or self._is_failing

    def submit(self, pending: PendingCheckpoint, meta: Callable[[], CheckpointMeta]) -> None:
        """Sends a checkpoint on its way and returns at once; `make_way` comes before.

        `meta` returns what its manifest says besides its files, and is called once these are in the store.
        """
        # An older one that still hangs in a request has its own event, and can fail no more: see `make_way`.
        self._newest, self._is_failing = pending, False
        self._thread = self._runtime.begin(partial(self._work, pending, meta), "baton-commit")

    def make_way(self) -> None:
        """Ends what is on its way, for a newer one; waits for it where it must be kept and gets through.

        It must be kept if the one before made way for it: uploads that take longer than what lies between checkpoints
        would all be given up.
        """
        made_way, self._made_way = self._made_way, False
        if not (self._thread and self._thread.is_alive() and self._newest):
            return
        if self._is_failing:  # it may hang in a request for a while yet: it ends by itself, and nothing waits for it
            self._newest.superseded.set()
            shutil.rmtree(self._newest.folder, ignore_errors=True)
            return
        if not (self._newest.must_keep or made_way):
            self._newest.superseded.set()
            self._made_way = True
        self._thread.join()

    def finish(self) -> None:
        """Waits until the last checkpoint is committed, and raises what keeps it from that."""
        if self._thread:
            self._thread.join()
        self.raise_failure()

    def abandon(self, seconds: float) -> None:
        """Gives what is on its way some time to arrive, when training has failed and little else can be saved."""
        if self._thread:
            self._thread.join(seconds)

    def raise_failure(self) -> None:
        """Raises what ended a commit, in the thread that trains."""
        if self._failure:
            raise self._failure

    def _work(self, pending: PendingCheckpoint, meta: Callable[[], CheckpointMeta]) -> None:
        try:
            self._commit(pending, meta)
        except SupersededError:
            logger.info("the checkpoint of step %d makes way for a newer one", pending.step)
            events.emit(events.Superseded(step=pending.step))
        # Training hears of it at the end of its step, see `raise_failure`: a thread's own error would be lost.
        except BaseException as error:
            # What fails after that says nothing of the newer one, but for another process's other bits: they are the
            # run's.
            if pending.superseded.is_set() and not isinstance(error, ExactnessError):
                logger.warning("the checkpoint of step %d, which made way, failed: %s", pending.step, error)
            else:
                self._failure = error
        finally:
            shutil.rmtree(pending.folder, ignore_errors=True)

    def _commit(self, pending: PendingCheckpoint, meta: Callable[[], CheckpointMeta]) -> None:
        writer = pending.writer or self._store.open_writer(pending.step, pending.check)
        began = self._runtime.monotonic()
        events.emit(events.Phase(phase=StagePhase.UPLOAD, step=pending.step))

        def send() -> tuple[Checkpoint, bool, float]:
            pending.check()
            writer.send(pending.folder)  # what is in the store already is not sent again
            uploaded = self._runtime.monotonic()
            pending.check()
            events.emit(events.Phase(phase=StagePhase.COMMIT, step=pending.step))
            # The manifest comes last: a crash before it leaves files that no reader takes for a checkpoint.
            return *self._store.commit(pending.step, writer, meta()), uploaded

        def unsaved_for(error: UnavailableError) -> float:
            unsaved = self._runtime.monotonic() - self._saved_at
            events.emit(events.StoreUnavailable(step=pending.step, unsaved=unsaved, reason=error.message))
            return unsaved

        def on_retry(error: UnavailableError, _: RetryAttempt) -> None:
            pending.check()
            self._is_failing = True
            saving = "%s Training continues; nothing has been saved for %.0f s."
            logger.warning(saving, error.message, unsaved_for(error))

        # Counted from the last commit: checkpoints that take each other's place share one bound.
        patience = self._max_unsaved - (began - self._saved_at)
        try:
            # A newer one ends the pause, so that `make_way` need not sit it out.
            tries = backoff(patience, pause=PAUSE, sleep=pending.superseded.wait, runtime=self._runtime)
            checkpoint, ours, uploaded = retry(send, UnavailableError, tries, on_retry)
        except UnavailableError as error:
            pending.check()
            raise UnavailableError(
                f"{error.message} No checkpoint could be saved for {unsaved_for(error):.0f} s, chunks.max_unsaved is "
                f"{self._max_unsaved:.0f} s; the chunk stops.",
                remedy="Mend the store and run again: training resumes from the newest checkpoint.",
            ) from error
        # Before the callback: retention in it may fail, and this one is saved.
        self._saved_at, self._is_failing = self._runtime.monotonic(), False
        self._committed(pending, checkpoint, ours, {"upload": uploaded - began, "commit": self._saved_at - uploaded})


class Committer:
    """The first rank's part: it commits complete checkpoints, and knows those that they come after.

    Attributes:
        start_step: Step at which the chunk began.
        parent: The newest checkpoint of this run that this process restored or committed.
        accounting: What the attempt costs.
        lost_race: Whether another process has committed the target.
        finished: Whether early stopping has ended the run.
    """

    def __init__(
        self, context: TrainContext, restored: FetchedCheckpoint | None, *, level: str, skipped: list[str]
    ) -> None:
        self._context, self._restored = context, restored
        self._level, self._skipped = level, skipped
        parallel = context.recipe.parallel
        self._fingerprint = Fingerprint.here(context.ranks.size, parallel.strategy, parallel.virtual_workers)
        self.start_step = restored.step if restored else 0
        self.parent: Checkpoint | None = restored.checkpoint if restored else None
        self.accounting = Accounting.of(context, restored.meta.work if restored else None, self.start_step)
        self.accounting.progress.step = self.start_step
        self.lost_race = restored is not None and restored.is_target
        self.finished = False
        self._cache = NodeCache.of(context.recipe.store)
        chunks = context.recipe.chunks
        self.uploader = Uploader(context.store, self._on_commit, max_unsaved=chunks.max_unsaved_seconds)
        self._stall_began = 0.0
        self._saved_at = time.monotonic()
        self._patience = context.run.storage.patience

    @property
    def reached(self) -> int:
        """The step of the newest checkpoint."""
        return self.parent.step if self.parent else 0

    def on_first_step(self) -> None:
        """Notes that training begins."""
        self._context.clock.enter(StagePhase.TRAIN)
        self._saved_at = time.monotonic()
        self.accounting.progress.start(self.start_step)
        # A checkpoint that does not get through is to be noticed soon; `Uploader` has the patience.
        self._context.run.storage.patience = min(self._patience, SOON)

    def judge(self, step: int, due_by_time: bool) -> StepDecision:
        """Returns what the other ranks do not know of a step's end; see `Checkpointer.agree`."""
        self.accounting.progress.step = step
        self.uploader.raise_failure()
        waits = self._context.recipe.chunks.wait_for_commit
        return StepDecision(self.lost_race, due_by_time, waits or self.uploader.is_idle)

    def make_way(self, step: int) -> None:
        """Prepares for a checkpoint before anything of it is written: two may not fit in memory."""
        self._context.clock.enter(StagePhase.SAVE, step=step)
        self._stall_began = time.monotonic()
        self.uploader.make_way()
        self.uploader.raise_failure()

    def take(self, pending: PendingCheckpoint, meta: CheckpointMeta) -> None:
        """Sends a complete checkpoint on its way, with what its manifest says of the state."""
        chunks, clock = self._context.recipe.chunks, self._context.clock
        self.finished = meta.finished
        trained_for = clock.seconds.get(StagePhase.TRAIN, 0.0)
        pending.must_keep |= bool(chunks.keep.every and pending.step % chunks.keep.every == 0)
        if self.lost_race:
            shutil.rmtree(pending.folder, ignore_errors=True)
        else:
            self.uploader.submit(pending, lambda: self.meta(meta, trained_for))
            if chunks.wait_for_commit or pending.writer:  # sent in parts: there is no room for another one meanwhile
                self.uploader.finish()
        self.accounting.stalls.append(time.monotonic() - self._stall_began)
        clock.enter(StagePhase.TRAIN)

    def meta(self, meta: CheckpointMeta, trained_for: float) -> CheckpointMeta:
        """Adds to what is known of the state all else that a manifest says besides files.

        Args:
            meta: What is known.
            trained_for: Seconds for which this attempt had trained when it was captured.
        """
        # Read as the commit is made, and not at the capture: only then is it known which checkpoint was committed
        # before this one.
        parent, context, storage = self.parent, self._context, self._context.run.storage
        # An older Baton's checkpoint lacks what changes here: whether it had changed before, nobody knows.
        looked = self._restored is None or self._restored.meta.hooks is not None
        unknown = not looked and meta.hooks and (meta.hooks.carried or meta.hooks.lost)
        level = "consistent" if unknown else self._level
        restored = {"step": self.start_step, "level": level, "skipped": self._skipped}
        return meta.model_copy(
            update={
                "parent": self._as_parent(parent) if parent else None,
                "chain": hashlib.sha256(f"{parent.meta.chain if parent else ''}{meta.digest}".encode()).hexdigest(),
                "restored": meta.restored.model_copy(update=restored),
                "identity": context.identity,
                "fingerprint": self._fingerprint,
                "chunk": context.index,
                "created": now(),
                "seconds": context.clock.split(),
                "moved": Transfer(sent=storage.sent, received=storage.received),
                "work": self.accounting.work(trained_for),
                "made": FormatVersions.here(CHECKPOINT_FORMATS),
            }
        )

    def _as_parent(self, parent: Checkpoint) -> Parent:
        """Returns what a checkpoint knows its parent by: where they are signed, by all that its manifest says."""
        signed = {} if self._context.store.signed_by is None else {"manifest": manifest_digest(parent.manifest)}
        return Parent(step=parent.step, digest=parent.digest, **signed)

    def finish(self) -> None:
        """Waits until the last checkpoint is committed."""
        self._context.clock.enter(StagePhase.UPLOAD)
        self.uploader.finish()
        self._context.run.storage.patience = self._patience

    def close(self) -> None:
        """Ends what runs beside training; a checkpoint on its way has a moment to arrive."""
        self.uploader.abandon(LAST_MOMENT)
        self.accounting.progress.end()

    def live(self) -> dict[str, float]:
        """Returns how far the chunk is now, by the names in `metrics.sinks.LIVE_GAUGES`."""
        work = self.accounting.work(self._context.clock.trained())
        return {
            "step": self.accounting.progress.step,
            "target_step": self._context.target,
            "checkpoint_step": self.reached,
            "unsaved_seconds": time.monotonic() - self._saved_at,
            "goodput": work.goodput,
            "lost_steps": work.lost_steps,
            "restarts": work.restarts,
        }

    def _on_commit(
        self, pending: PendingCheckpoint, checkpoint: Checkpoint, ours: bool, seconds: dict[str, float]
    ) -> None:
        """Notes a commit, in the thread beside training."""
        context, step, digest = self._context, checkpoint.step, checkpoint.digest
        if not ours:
            if digest != pending.digests["state"]:
                raise ExactnessError(
                    f"another process committed step {step} with digest {digest[:12]}…, this one has "
                    f"{pending.digests['state'][:12]}…; this one stops.",
                    remedy="Give each run its own name; if this is one run, the hardware differs.",
                )
            logger.warning("another process committed step %d first, with the same state; training continues", step)
        # Only this thread commits, one checkpoint at a time: the next one's manifest names this one as its parent.
        if self.reached <= step:
            self.parent = checkpoint
        self._saved_at = time.monotonic()
        uri = context.store.uri(checkpoint)
        events.emit(
            events.CheckpointCommitted(step=step, uri=uri, digest=digest, bytes=checkpoint.bytes, seconds=seconds)
        )
        # Before the staged folder goes: the files are linked, or copied from memory, and the next pod here need not
        # fetch them.
        if ours and self._cache and not context.run.storage.is_local:
            for name, entry in checkpoint.manifest.files.items():
                self._cache.keep(entry["sha256"], os.path.join(pending.folder, name))
        if step < context.target:  # at the target the checkpoint stage does it, once all is proven
            try:  # failing in it is no reason to stop
                # Another process may train the same chunk, such as a pod that was thought gone; both are right.
                self.lost_race = committed_at_target(context.store, context.target) is not None
            except (BatonError, FileNotFoundError) as error:
                logger.warning("another process at the same chunk was not looked for: %s", error)
            keep, in_use = context.recipe.chunks.keep, self.start_step
            retention.tidy(context.store, keep, targets=context.plan.targets, in_use=in_use)


@dataclass(frozen=True)
class StepDecision:
    """The ranks' common decision after a step.

    Attributes:
        stop: Whether to save and end the chunk here.
        due_by_time: Whether a checkpoint is due by time.
        uploader_idle: Whether one captured now would be sent at once.
        figures: What each rank had to tell of the step.
    """

    stop: bool = False
    due_by_time: bool = False
    uploader_idle: bool = False
    figures: Sequence[Sequence[float]] = ()


class Checkpointer:
    """The part of one rank in the checkpoints of a chunk; the first one's has a committer.

    All ranks call the same methods in the same order: each gathers. A world of one rank agrees with itself. `pending`
    is the checkpoint that is being written.
    """

    def __init__(
        self,
        context: TrainContext,
        staging: Staging,
        watch: PreemptionWatch,
        watchdog: Watchdog,
        committer: Committer | None = None,
    ) -> None:
        self.context, self.committer, self.watchdog = context, committer, watchdog
        self._staging, self._watch, self._ranks = staging, watch, context.ranks
        self._remote_notice: str | None = None
        self.pending: PendingCheckpoint | None = None

    @property
    def notice(self) -> str | None:
        """Why the chunk is to stop: this machine's notice, or another's of those that train together."""
        return self._watch.notice or self._remote_notice

    def agree(self, step: int, due_by_time: bool, figures: Sequence[float] = ()) -> StepDecision:
        """Decides for all after each step. Any machine's notice of preemption counts, all else the first rank's word.

        Args:
            step: The step.
            due_by_time: Whether a checkpoint is due by time.
            figures: What this rank has to tell of the step, as many as each.

        Raises:
            BatonError: in the first rank, what went wrong in the background.
        """
        ours = self.committer.judge(step, due_by_time) if self.committer else StepDecision()
        stop = ours.stop or self._watch.notice is not None
        numbers = [stop, ours.due_by_time, ours.uploader_idle, *figures]
        # One gather a step for all that the ranks must agree on.
        rows = self._ranks.gather_numbers([float(number) for number in numbers])
        # What is due by time is the first rank's word: clocks differ, and all must save at the same step.
        told = [row[3:] for row in rows] if figures else ()
        decision = StepDecision(any(row[0] for row in rows), bool(rows[0][1]), bool(rows[0][2]), told)
        if decision.stop:  # the same in all ranks, so that all gather once more or none does
            self.is_preempted()
        return decision

    def is_preempted(self) -> bool:
        """Tells whether some machine is to be preempted; before training begins, too."""
        notices = self._ranks.gather(self._watch.notice)
        self._remote_notice = next((notice for notice in notices if notice), self._remote_notice)
        return any(notices)

    def on_first_step(self, restored_folder: str | None) -> None:
        """Notes that training begins."""
        if self.committer:
            self.committer.on_first_step()
            if restored_folder:
                self._staging.drop(restored_folder)  # one copy in memory, not two

    def stage(self, step: int, num_bytes: int) -> Iterator[PendingCheckpoint]:
        """Yields a step's checkpoint in each place to write it to: one of each machine, the same for its ranks."""
        self.watchdog.heartbeat("checkpoint")
        places = self._staging.places(num_bytes) if self._ranks.leads_node else iter(())

        def next_place() -> tuple[str, bool] | None:
            place = next(places, None)
            if place and not place[1] and self._ranks.size > 1:
                raise BatonError(
                    "there is no room to stage a checkpoint, neither in memory nor on disk, and several processes "
                    "cannot send theirs file by file.",
                    remedy="Give the pod more resources.shm, or a larger disk for its temporary files.",
                )
            return place

        def first_place() -> tuple[str, bool] | None:
            if self.committer:
                self.committer.make_way(step)
            return next_place()

        with self.watchdog.paused():  # the checkpoint before may be on its way
            place = self._ranks.on_node_leaders(first_place)
        while place:
            folder, fits = place
            writer = None if fits else self.context.store.open_writer(step)
            self.pending = PendingCheckpoint(step, os.path.join(folder, f"checkpoint-{step}"), writer)
            yield self.pending
            # Comes back here only where some rank ran out of room: then all try the next place together.
            place = self._ranks.on_node_leaders(next_place)

    def save(self, pending: PendingCheckpoint, meta: CheckpointMeta) -> None:
        """Takes a complete checkpoint: all ranks have written their part.

        Returns once the first rank has taken it, so that no rank trains on while it may still fail.
        """
        with self.watchdog.paused():
            if self._ranks.nodes > 1:
                self._join_nodes(pending)
            if self.committer:
                self.committer.take(pending, meta)
            self._ranks.gather(None)

    def _join_nodes(self, pending: PendingCheckpoint) -> None:
        """Sends what other machines have written, as part of the first one's attempt; that commits it all."""
        # All machines write into the first one's folder, whose manifest names their files: one commit, or none.
        writer = pending.writer or self.context.store.open_writer(pending.step)
        writer.folder = self._ranks.on_first(lambda: writer.folder)
        # With virtual workers another machine has no part, and no folder.
        if self._ranks.leads_node and self._ranks.node and os.path.isdir(pending.folder):
            writer.send(pending.folder)
        # After each machine has sent its files: the first one then commits what is in the store, and nothing else.
        for files in self._ranks.gather(writer.files):
            writer.files.update(files)
        pending.writer = writer

    def finish(self) -> None:
        """Waits until the last checkpoint is committed."""
        if self.committer:
            self.committer.finish()

    def close(self) -> None:
        """Ends what runs beside training; a checkpoint on its way has a moment to arrive."""
        if self.committer:
            self.committer.close()
