"""Checkpoints of a chunk: agreed between ranks, written by all, committed by the first in a thread during training.

Every rank has a `Checkpointer`; the first rank's has a `Committer`, which keeps the chain of states and sends staged
checkpoints through an `Uploader`.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from baton import events
from baton.checkpoint import retention
from baton.checkpoint.proof import proof_part
from baton.checkpoint.restore import FetchedCheckpoint, committed_at_target
from baton.checkpoint.signatures import manifest_digest
from baton.checkpoint.staging import PendingCheckpoint, Staging, SupersededError
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore, Parent, chained
from baton.errors import BatonError, ExactnessError, UnavailableError
from baton.runs.documents import ChunkAttempt, Progress, RunCost, RunEnd, StagePhase, Transfer
from baton.runs.run import Run, now
from baton.runs.versions import CHECKPOINT_FORMATS, Fingerprint, FormatVersions
from baton.runtime import RetryAttempt, Work, backoff, retry
from baton.train.budget import BudgetWatch, decide
from baton.train.context import Clock, TrainContext
from baton.train.distributed import Watchdog
from baton.train.preemption import PreemptionWatch

logger = logging.getLogger("baton")

PAUSE = 2.0  # seconds between two commits tried while the store is unavailable
# Seconds between two notes of the step that training is at, by which a kill's lost work is known.
NOTES, LOCAL_NOTES = 10.0, 1.0
LAST_MOMENT = 30.0  # seconds for which a failed chunk waits for a checkpoint on its way
SOON = 5.0  # seconds of retries for one request before the commit counts as failing

# Arguments: the staged and the committed checkpoint, whether it is this process's, seconds of upload and commit.
Committed = Callable[[PendingCheckpoint, Checkpoint, bool, dict[str, float]], None]


class Uploader:
    """Uploads and commits one staged checkpoint at a time in its own thread; a newer one supersedes it.

    `committed` is called in that thread. The chunk fails after `max_unsaved` seconds without a commit.
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
        """Whether a checkpoint staged now is sent at once: none is on its way, or it does not get through."""
        return self._thread is None or not self._thread.is_alive() or self._is_failing

    def submit(self, pending: PendingCheckpoint, meta: Callable[[], CheckpointMeta]) -> None:
        """Begins to send a checkpoint, after `make_way`; calls `meta` once its files are in the store."""
        # An older one that still hangs in a request has its own event and can no longer fail the chunk: see `make_way`.
        self._newest, self._is_failing = pending, False
        self._thread = self._runtime.begin(partial(self._work, pending, meta), "baton-commit")

    def make_way(self) -> None:
        """Ends the upload on its way for a newer checkpoint, or waits for it if it must be kept and gets through."""
        made_way, self._made_way = self._made_way, False
        if not (self._thread and self._thread.is_alive() and self._newest):
            return
        if self._is_failing:  # it may hang in a request for a while yet: let it end by itself
            self._newest.superseded.set()
            shutil.rmtree(self._newest.folder, ignore_errors=True)
            return
        # Never two in a row: if uploads take longer than the time between checkpoints, none would ever arrive.
        if not (self._newest.must_keep or made_way):
            self._newest.superseded.set()
            self._made_way = True
        self._thread.join()

    def finish(self) -> None:
        """Waits until the last checkpoint is committed, and raises the failure of its commit."""
        if self._thread:
            self._thread.join()
        self.raise_failure()

    def abandon(self, seconds: float) -> None:
        """Waits some seconds for a checkpoint on its way, after training has failed."""
        if self._thread:
            self._thread.join(seconds)

    def raise_failure(self) -> None:
        """Raises a commit's failure in the training thread."""
        if self._failure:
            raise self._failure

    def _work(self, pending: PendingCheckpoint, meta: Callable[[], CheckpointMeta]) -> None:
        try:
            self._commit(pending, meta)
        except SupersededError:
            logger.info("the checkpoint of step %d makes way for a newer one", pending.step)
            events.emit(events.Superseded(step=pending.step))
        # Kept until the training thread calls `raise_failure` at its step's end: a thread's own error would be lost.
        except BaseException as error:
            # A superseded one may fail, as the newer one takes its place. Other bits committed by another process may
            # not: they are the run's now, and this process would train on from different ones.
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
            writer.send(pending.folder)  # on a retry, only files that are not in the store yet
            uploaded = self._runtime.monotonic()
            pending.check()
            events.emit(events.Phase(phase=StagePhase.COMMIT, step=pending.step))
            # The manifest comes last: files of a crash before it are no checkpoint to any reader, and retention
            # removes them once they are old. `meta` is called only here: the parent may change until then.
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

        # Counted from the last commit: checkpoints that supersede each other share one bound.
        patience = self._max_unsaved - (began - self._saved_at)
        try:
            # A newer checkpoint ends the pause, so that `make_way` need not wait for it.
            tries = backoff(patience, pause=PAUSE, sleep=pending.superseded.wait, runtime=self._runtime)
            checkpoint, ours, uploaded = retry(send, UnavailableError, tries, on_retry)
        except UnavailableError as error:
            pending.check()
            raise UnavailableError(
                f"{error.message} No checkpoint could be saved for {unsaved_for(error):.0f} s, chunks.max_unsaved is "
                f"{self._max_unsaved:.0f} s; the chunk stops.",
                remedy="Fix the store and run again: training resumes from the newest checkpoint.",
            ) from error
        # Before the callback: retention in it may fail, but this checkpoint is saved.
        self._saved_at, self._is_failing = self._runtime.monotonic(), False
        self._committed(pending, checkpoint, ours, {"upload": uploaded - began, "commit": self._saved_at - uploaded})


@dataclass(frozen=True)
class Lost:
    """Work of the process before beyond the checkpoint that is restored now; the seconds are an estimate."""

    steps: int = 0
    seconds: float = 0.0


class ProgressNotes:
    """Notes the step a chunk is at, during training."""

    def __init__(self, run: Run, chunk: int) -> None:
        self.run, self.chunk = run, chunk
        self.step = self._from_step = 0
        self.before: Progress | None = None  # the last note, of the process before
        self.costs: Callable[[], dict[str, float]] = dict  # what a note has of the run's budget
        self._began = time.monotonic()
        self._ended = threading.Event()

    def lost(self, restored_step: int) -> Lost:
        """Returns the work lost beyond the checkpoint restored now, up to the last note."""
        note = self.before = self.run.read(Progress)
        if note is None or note.step <= restored_step:
            return Lost()
        steps = note.step - restored_step
        return Lost(steps, steps * note.seconds_per_step)

    def start(self, step: int) -> None:
        """Begins to take notes after the step restored; a store that takes none is no reason to stop."""
        self.step = self._from_step = step
        self._began = time.monotonic()
        threading.Thread(target=self._work, name="baton-progress", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        noted = self._from_step
        try:
            before = self.run.read(Progress)
            if before and before.step > noted:  # lost steps are reported once, by the first process that trains again
                self.run.write(before.model_copy(update={"step": noted}))
        except BatonError as error:
            logger.warning("progress was not noted: %s", error.message)
        while not self._ended.wait(LOCAL_NOTES if self.run.storage.is_local else NOTES):
            if self.step == noted:
                continue
            noted = self.step
            pace = (time.monotonic() - self._began) / (noted - self._from_step)
            try:
                note = Progress(step=noted, chunk=self.chunk, seconds_per_step=pace, at=now(), **self.costs())
                self.run.write(note)
            except BatonError as error:
                logger.warning("progress was not noted: %s", error.message)


@dataclass
class Accounting:
    """The costs of one attempt."""

    clock: Clock
    progress: ProgressNotes
    before: RunCost  # the run's cost at the checkpoint that is restored
    lost: Lost
    restarts: int = 0  # processes of the run that were lost and replaced in their pod
    stalls: list[float] = field(default_factory=list)  # seconds that each checkpoint held training
    budget: BudgetWatch | None = None

    @classmethod
    def of(cls, context: TrainContext, before: RunCost | None, start_step: int) -> Accounting:
        progress = ProgressNotes(context.run, context.index)
        return cls(context.clock, progress, before or RunCost(), progress.lost(start_step), context.run.num_restarts())

    def work(self, trained_for: float) -> RunCost:
        started = self.before.started or self.clock.began
        trained = self.before.trained_seconds + trained_for
        return RunCost(
            started=started,
            trained_seconds=trained,
            goodput=trained / max(time.time() - started, 1e-9),
            lost_steps=self.before.lost_steps + self.lost.steps,
            lost_seconds=self.before.lost_seconds + self.lost.seconds,
            restarts=self.restarts,
            **(self.budget.spent() if self.budget else {}),
        )

    def figures(self) -> dict[str, object]:
        return {
            "lost_steps": self.lost.steps,
            "lost_seconds": self.lost.seconds,
            "save_stalls": self.stalls,
            "peak_bytes": peak_bytes(),
        }


def peak_bytes() -> int:
    """Returns the most memory this process has held at once."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)


class Committer:
    """The first rank's part: commits complete checkpoints and keeps their chain."""

    def __init__(
        self, context: TrainContext, restored: FetchedCheckpoint | None, *, level: str, skipped: list[str]
    ) -> None:
        self._context, self._restored = context, restored
        self._level, self._skipped = level, skipped
        parallel, bnb = context.recipe.parallel, context.recipe.uses_bitsandbytes
        size, workers = context.ranks.size, parallel.virtual_workers
        self._fingerprint = Fingerprint.here(size, parallel.strategy, workers, uses_bitsandbytes=bnb)
        self.start_step = restored.step if restored else 0
        # The run's newest checkpoint that this process restored or committed.
        self.parent: Checkpoint | None = restored.checkpoint if restored else None
        self.accounting = Accounting.of(context, restored.meta.work if restored else None, self.start_step)
        self.accounting.progress.step = self.start_step
        if context.recipe.budget:
            budget = BudgetWatch(context, self.accounting.before, self.accounting.progress.before)
            self.accounting.before = self.accounting.before.model_copy(update={"started": budget.started})
            self.accounting.budget, self.accounting.progress.costs = budget, budget.costs
        self.lost_race = restored is not None and restored.is_target  # another process has committed the target
        self.finished = False  # early stopping or the budget has ended the run
        self.end = context.end
        self._cache = context.cache
        chunks = context.recipe.chunks
        self.uploader = Uploader(context.store, self._on_commit, max_unsaved=chunks.max_unsaved_seconds)
        self._stall_began = 0.0
        self._saved_at = time.monotonic()
        self._patience = context.run.storage.patience

    @property
    def reached(self) -> int:
        return self.parent.step if self.parent else 0

    def on_first_step(self) -> None:
        self._context.clock.enter(StagePhase.TRAIN)
        self._saved_at = time.monotonic()
        if self.accounting.budget:
            self.accounting.budget.on_first_step()
        lost = self.accounting.lost.steps
        if self.start_step or lost:
            events.emit(events.TrainingResumed(chunk=self._context.index, step=self.start_step, repeated=lost))
        self.accounting.progress.start(self.start_step)
        # Requests fail fast from here: `Uploader` must notice soon that a commit does not get through, and retries it.
        self._context.run.storage.patience = min(self._patience, SOON)
        try:
            self._record_killed()
        except BatonError as error:  # a picture of the run, not the run
            logger.warning("The previous attempt was not recorded: %s", error.message)

    def _record_killed(self) -> None:
        """Records the attempt before this one if it left no record, as it was killed.

        Also keeps the restored checkpoint's part of the proof, as retention may remove the checkpoint.
        """
        context, restored, lost, step = self._context, self._restored, self.accounting.lost, self.start_step
        run, meta = context.run, restored.meta if restored else None
        if not lost.steps and (step in (0, *context.plan.targets) or step == run.began()):
            return  # as usual, at no cost
        reached = step + lost.steps
        attempts = [each for each in run.attempts() if each.outcome != "already_done"]
        saved = [each.to_step - (each.lost_steps if each.outcome == "killed" else 0) for each in attempts]
        # Recorded up to there, so that checkpoints were lost, not an attempt; or undone by the guard, to skip a step.
        is_recorded = any(each.outcome != "killed" and each.to_step >= reached for each in attempts)
        if is_recorded or any(step < skip.step <= reached + 1 for skip in run.skips()):
            return
        began, chunk = step, context.index
        seconds: dict[str, float] = {}
        if meta and step > run.began() and step not in saved:  # the attempt made this checkpoint
            began, chunk, seconds = meta.restored.step, meta.chunk, dict(meta.seconds)
        elif not lost.steps:
            return
        seconds[StagePhase.TRAIN] = seconds.get(StagePhase.TRAIN, 0.0) + lost.seconds
        note = self.accounting.progress.before if context.recipe.budget else None
        if note and began == step:  # no checkpoint of its own tells its start
            seconds[StagePhase.START] = max(note.process_seconds - lost.seconds, 0.0)
        killed = ChunkAttempt(
            outcome="killed",
            from_step=began,
            to_step=reached,
            seconds=seconds,
            total_seconds=sum(seconds.values()),
            lost_steps=lost.steps,
            lost_seconds=lost.seconds,
        )
        if note:
            killed = killed.model_copy(update={"price": note.price})
        run.record(f"train-chunk-{chunk:03d}", {"chunk": chunk, **killed.to_json()})
        if restored:
            # Read back in whole, and compared with the state in memory.
            part = proof_part(context.store, restored.checkpoint).model_copy(update={"verified": True})
            run.put(f"proof/restored-{step:08d}.json", part.to_json())

    def judge(self, step: int, due_by_time: bool) -> StepDecision:
        """Returns the first rank's part of `Checkpointer.agree`."""
        self.accounting.progress.step = step
        self.uploader.raise_failure()
        waits = self._context.recipe.chunks.wait_for_commit
        overhead = 2 * max(self.accounting.stalls, default=0.0)  # of the saves before and after the decay
        budget = self.accounting.budget
        ends = bool(budget and not self.end and budget.is_due(step, overhead))
        if budget and not self.end and not ends and (foreseen := budget.foresee(step, overhead)):
            events.emit(foreseen)
        return StepDecision(self.lost_race, due_by_time, waits or self.uploader.is_idle, ends)

    def decide_end(self, step: int) -> RunEnd | None:
        """Commits the run's end after a step; None where the store does not answer, as the next step may decide."""
        assert self.accounting.budget
        try:
            end = self.end = decide(self._context, self.accounting.budget.end_after(step))
        except UnavailableError as error:
            logger.warning("the run's end was not decided: %s", error.message)
            return None
        self._context.store.end = end.span
        events.emit(events.EndDecided(step=end.last_step, stable_until=end.stable_until, reason=end.reason))
        if not end.is_decayed:
            self._context.run.warn(
                f"training ends at step {end.last_step} for {end.reason}, and the learning rate has not decayed"
            )
        return end

    def make_way(self, step: int) -> None:
        self._context.clock.enter(StagePhase.SAVE, step=step)
        self._stall_began = time.monotonic()
        # Before the new one is written: two may not fit in memory.
        self.uploader.make_way()
        self.uploader.raise_failure()

    def take(self, pending: PendingCheckpoint, meta: CheckpointMeta) -> None:
        """Begins to send a complete checkpoint."""
        chunks, clock = self._context.recipe.chunks, self._context.clock
        self.finished = meta.finished
        trained_for = clock.seconds.get(StagePhase.TRAIN, 0.0)
        pending.must_keep |= bool(chunks.keep.every and pending.step % chunks.keep.every == 0)
        if self.lost_race:
            shutil.rmtree(pending.folder, ignore_errors=True)
        else:
            self.uploader.submit(pending, lambda: self.meta(meta, trained_for))
            if chunks.wait_for_commit or pending.writer:  # a writer: no room for another checkpoint meanwhile
                self.uploader.finish()
        self.accounting.stalls.append(time.monotonic() - self._stall_began)
        clock.enter(StagePhase.TRAIN)

    def meta(self, meta: CheckpointMeta, trained_for: float) -> CheckpointMeta:
        """Completes a manifest's meta; `trained_for` is the attempt's seconds of training at the capture."""
        # The parent is read at the commit: at the capture, the previous checkpoint was on its way and might not arrive.
        parent, context, storage = self.parent, self._context, self._context.run.storage
        # An older Baton's checkpoint does not tell of state of the user's code: if there is some now, it may be lost.
        looked = self._restored is None or self._restored.meta.hooks is not None
        unknown = not looked and meta.hooks and (meta.hooks.carried or meta.hooks.lost)
        level = "consistent" if unknown else self._level
        restored = {"step": self.start_step, "level": level, "skipped": self._skipped}
        return meta.model_copy(
            update={
                "parent": self._as_parent(parent) if parent else None,
                "chain": chained(parent, meta.digest),
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
        # A signed one also names the parent's whole manifest: another checkpoint of that step cannot take its place.
        signed = {} if self._context.store.signed_by is None else {"manifest": manifest_digest(parent.manifest)}
        return Parent(step=parent.step, digest=parent.digest, **signed)

    def finish(self) -> None:
        self._context.clock.enter(StagePhase.UPLOAD)
        self.uploader.finish()
        self._context.run.storage.patience = self._patience

    def close(self) -> None:
        self.uploader.abandon(LAST_MOMENT)
        self.accounting.progress.end()

    def live(self) -> dict[str, float]:
        """Returns the chunk's progress, by the names in `live.LIVE_GAUGES`."""
        work, step = self.accounting.work(self._context.clock.trained()), self.accounting.progress.step
        last = self.end.last_step if self.end else self._context.plan.num_steps
        budget = self.accounting.budget.figures(max(last - step, 0)) if self.accounting.budget else {}
        return {
            **budget,
            "step": step,
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
        """Records a commit, in the committing thread."""
        context, step, digest = self._context, checkpoint.step, checkpoint.digest
        if not ours:
            if digest != pending.digests["state"]:
                raise ExactnessError(
                    f"another process committed step {step} with digest {digest[:12]}…, this one has "
                    f"{pending.digests['state'][:12]}…; this one stops.",
                    remedy="Give each run its own name; if this is one run, the hardware differs.",
                )
            logger.warning("another process committed step %d first, with the same state; training continues", step)
        # One commit at a time, so that the next manifest names this one as its parent; but an older one that hung in a
        # request may arrive late, and must not become the parent.
        if self.reached <= step:
            self.parent = checkpoint
        self._saved_at = time.monotonic()
        uri = context.store.uri(checkpoint)
        events.emit(
            events.CheckpointCommitted(step=step, uri=uri, digest=digest, bytes=checkpoint.bytes, seconds=seconds)
        )
        # Before the staged folder is removed: its files are linked or copied, and the next pod on this node need not
        # download them.
        if ours and self._cache and not context.run.storage.is_local:
            for name, entry in checkpoint.manifest.files.items():
                self._cache.keep(entry["sha256"], os.path.join(pending.folder, name))
        if step < context.target:  # at the target, the checkpoint stage applies retention after its proof
            try:  # a failure here is no reason to stop
                # Another process may train the same chunk, such as a pod that was thought gone, to the same bits.
                self.lost_race = committed_at_target(context.store, context.target) is not None
            except (BatonError, FileNotFoundError) as error:
                logger.warning("another process at the same chunk was not looked for: %s", error)
            keep, in_use = context.recipe.chunks.keep, self.start_step
            retention.tidy(context.store, keep, targets=context.plan.targets, in_use=in_use)


@dataclass(frozen=True)
class StepDecision:
    """The ranks' common decision after a step."""

    stop: bool = False  # save and end the chunk here
    due_by_time: bool = False
    uploader_idle: bool = False  # a checkpoint captured now is sent at once
    ends: bool = False  # the run's end is to be decided, for its budget
    figures: Sequence[Sequence[float]] = ()  # by rank


class Checkpointer:
    """One rank's part in a chunk's checkpoints; `pending` is the one being written.

    All ranks call the same methods in the same order, as each gathers: a rank that omits one hangs the others.
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
        """Notice of preemption of this machine or another that trains along."""
        return self._watch.notice or self._remote_notice

    def agree(self, step: int, due_by_time: bool, figures: Sequence[float] = ()) -> StepDecision:
        """Makes the ranks' common decision after each step, or raises a commit's failure; all have as many figures."""
        ours = self.committer.judge(step, due_by_time) if self.committer else StepDecision()
        stop = ours.stop or self._watch.notice is not None
        numbers = [stop, ours.due_by_time, ours.uploader_idle, ours.ends, *figures]
        # One gather a step for everything that ranks must agree on. Any machine's notice stops all; the rest is decided
        # by the first rank: clocks differ, only it has an uploader, and all must save at the same step.
        rows = self._ranks.gather_numbers([float(number) for number in numbers])
        told = [row[4:] for row in rows] if figures else ()
        due_by_time, uploader_idle, ends = map(bool, rows[0][1:4])
        decision = StepDecision(any(row[0] for row in rows), due_by_time, uploader_idle, ends, told)
        if decision.stop:  # the same in all ranks, so that all gather once more or none does
            self.is_preempted()
        return decision

    def is_preempted(self) -> bool:
        """Gathers whether any machine is to be preempted."""
        notices = self._ranks.gather(self._watch.notice)
        self._remote_notice = next((notice for notice in notices if notice), self._remote_notice)
        return any(notices)

    def on_first_step(self, restored_folder: str | None) -> None:
        if self.committer:
            self.committer.on_first_step()
            if restored_folder:
                self._staging.drop(restored_folder)  # one copy in memory, not two

    def stage(self, step: int, num_bytes: int) -> Iterator[PendingCheckpoint]:
        """Yields a step's checkpoint in each place to write it to, which the ranks of a machine share."""
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

        with self.watchdog.paused():  # `make_way` may wait for the previous checkpoint
            place = self._ranks.on_node_leaders(first_place)
        while place:
            folder, fits = place
            writer = None if fits else self.context.store.open_writer(step)
            self.pending = PendingCheckpoint(step, os.path.join(folder, f"checkpoint-{step}"), writer)
            yield self.pending
            # Resumed only if some rank ran out of room: then all ranks try the next place together.
            place = self._ranks.on_node_leaders(next_place)

    def save(self, pending: PendingCheckpoint, meta: CheckpointMeta) -> None:
        """Commits a checkpoint whose parts all ranks have written."""
        with self.watchdog.paused():
            if self._ranks.nodes > 1:
                self._join_nodes(pending)
            if self.committer:
                self.committer.take(pending, meta)
            # No rank trains on while the first one's `take` may still fail.
            self._ranks.gather(None)

    def _join_nodes(self, pending: PendingCheckpoint) -> None:
        """Sends other machines' files as part of the first one's attempt, which commits them all."""
        # One folder, so that one manifest names the files of all machines: one commit, or none.
        writer = pending.writer or self.context.store.open_writer(pending.step)
        writer.folder = self._ranks.on_first(lambda: writer.folder)
        # With virtual workers, other machines have no part and no folder.
        if self._ranks.leads_node and self._ranks.node and os.path.isdir(pending.folder):
            writer.send(pending.folder)
        # This gather ends only after each machine has sent its files: the first one's manifest names no file that is
        # not in the store.
        for files in self._ranks.gather(writer.files):
            writer.files.update(files)
        pending.writer = writer

    def finish(self) -> None:
        if self.committer:
            self.committer.finish()

    def close(self) -> None:
        """Ends the commit thread; a checkpoint on its way has `LAST_MOMENT` to arrive."""
        if self.committer:
            self.committer.close()
