"""One attempt at training a chunk, in each rank: resumption, checks, callbacks, and the last commit."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from baton import events
from baton.checkpoint.restore import Restored
from baton.checkpoint.staging import Staging
from baton.errors import BatonError, ExactnessError, UserError
from baton.recipe.recipe import Recipe
from baton.runs.documents import OwnState, Phase
from baton.runs.versions import Fingerprint
from baton.store.cache import NodeCache
from baton.train import build, guard
from baton.train import guard as skipping
from baton.train.callbacks import CheckpointCallback, EvaluationsPerEpoch, Pace, Schedule
from baton.train.checkpointer import Checkpointer, CheckpointManager, Lineage, Services
from baton.train.context import TrainContext
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.distributed.ranks import Ranks
from baton.train.distributed.watchdog import NullWatchdog, Watchdog
from baton.train.fork import ForkOverrides
from baton.train.inputs import Inputs
from baton.train.metrics import report as observers
from baton.train.metrics.accounting import Accounting
from baton.train.metrics.live import LiveReport
from baton.train.metrics.score import Score, Scoring
from baton.train.protocol import ChunkTrainer, Resumption

# --- What a trainer resumes from: the state of a checkpoint, whose it is, and the steps that are skipped.


def resumption(restored: Restored | None, context: TrainContext, leave_out: tuple[str, ...]) -> Resumption:
    """Returns what a trainer resumes from; all ranks must call it.

    Args:
        restored: The checkpoint, None at the start of a run.
        context: The chunk.
        leave_out: Parts of the state not to restore.
    """
    # One rank asks the store for all: they must skip the same steps.
    guard = context.recipe.training.guard
    skips = context.ranks.on_first(lambda: skipping.known_skips(context, restored)) if guard else ()
    if restored is None:
        return Resumption(leave_out=leave_out, skips=skips)
    return Resumption(
        folder=restored.folder,
        digests=restored.meta.state,
        carried=restored.meta.hooks.carried if restored.meta.hooks else {},
        leave_out=leave_out,
        takeover=ForkOverrides.of(restored.folder, restored.meta),
        ranks=restored.meta.fingerprint.world_size,
        strategy=restored.meta.fingerprint.strategy,
        # With virtual workers a checkpoint is that of one process, whatever their number.
        is_reshaped=restored.meta.fingerprint.world_size != context.ranks.size
        and not context.recipe.parallel.virtual_workers,
        skips=skips,
    )


# --- Checks whether these ranks can resume a checkpoint on this machine, and how exactly.


logger = logging.getLogger("baton")

OTHERS = "another number of processes kept it"


def adapt_machine(restored: Restored | None, ranks: Ranks, recipe: Recipe) -> str:
    """Sets what bits depend on, and returns how exactly a checkpoint can be resumed here.

    Returns:
        `bitwise`, or `consistent` where the machine differs or state of the user's code is not restored.

    Raises:
        BatonError: other machines resume from another step.
        UserError: the checkpoint is split over ranks as this chunk's are not.
        ExactnessError: bits may differ, and the recipe asks for bits.
    """
    # A checkpoint may have come while they looked.
    steps = ranks.gather(restored.step if restored else 0)
    if len(set(steps)) > 1:
        raise BatonError(f"the machines found different newest checkpoints: {steps}.", remedy="Run again.")
    # The first chunk's number of threads holds for the run, whatever torch would choose on this machine.
    threads = restored.meta.fingerprint.threads if restored else recipe.training.threads
    workers = recipe.parallel.virtual_workers
    if workers and not threads:  # as many for one process as for several, each of which has its share of the cores
        threads = max(1, (os.cpu_count() or 1) // workers)
    build.make_deterministic(threads, recipe.training.deterministic, tf32=build.uses_tf32(recipe))
    if restored is None:
        return "bitwise"
    theirs = restored.meta.fingerprint
    changed = Fingerprint.here(ranks.size, recipe.parallel.strategy, workers).differences(theirs)
    own = restored.meta.hooks or OwnState()
    lost = own.lost if theirs.world_size == ranks.size else {**dict.fromkeys(own.carried, OTHERS), **own.lost}
    if lost:
        if recipe.chunks.exactness == "bitwise":
            raise ExactnessError(
                "chunks.exactness is bitwise, but "
                f"{'; '.join(f'state of `{name}` is not carried: {why}' for name, why in lost.items())}.",
                remedy=f"{events.NotCarried.REMEDY} Or set chunks.exactness to consistent.",
            )
        events.emit(events.NotCarried(step=restored.step, lost=lost))
    if not changed:
        return "consistent" if lost else "bitwise"
    _require_readable(restored.step, theirs, ranks, recipe)
    if recipe.chunks.exactness == "bitwise":
        raise ExactnessError(
            f"chunks.exactness is bitwise, but this machine differs from the checkpoint's: {'; '.join(changed)}.",
            remedy="Run on the same kind of machine and image, or set chunks.exactness to consistent.",
        )
    logger.warning("this machine differs from the checkpoint's, so bits may differ: %s", "; ".join(changed))
    events.emit(events.Consistent(changed=changed))
    return "consistent"


def _require_readable(step: int, theirs: Fingerprint, ranks: Ranks, recipe: Recipe) -> None:
    """Checks that a checkpoint is split over ranks as this chunk's are, over however many.

    One rank reads what any have split, and FSDP splits what one has written.

    Raises:
        UserError: it is not.
    """
    now = recipe.parallel.strategy if ranks.size > 1 else "ddp"
    was_alone = theirs.world_size == 1
    if ranks.size > 1 and theirs.strategy != now and not (was_alone and now == "fsdp"):
        how = "by one process" if was_alone else f"with training.parallel.strategy {theirs.strategy}"
        raise UserError(
            f"the checkpoint of step {step} was written {how}, and this chunk has {now}.",
            remedy="Set training.parallel back, train on in one process, or fork the run's exported model.",
        )


# --- A trainer made to resume and to save: its resumption, its checkpoint manager and callback, and who looks on.


@dataclass(frozen=True)
class Assembly:
    """The callbacks and services that are attached to a trainer.

    Attributes:
        callback: Decides when to save and to stop.
        manager: Takes what is saved.
        lead: The same in the first rank, where it commits; None in all others.
        report: Sends metrics, in the first rank.
    """

    callback: CheckpointCallback
    manager: Checkpointer
    lead: CheckpointManager | None
    report: LiveReport | None

    def close(self) -> None:
        """Ends what runs beside training."""
        self.manager.close()
        if self.report:
            self.report.close()


def assemble(
    trainer: ChunkTrainer,
    services: Services,
    restored: Restored | None,
    *,
    level: str,
    skipped: list[str],
    leave_out: tuple[str, ...],
    reports: bool = True,
) -> Assembly:
    """Makes a trainer resume, save and report.

    Args:
        trainer: The trainer.
        services: What this rank works with.
        restored: The checkpoint to resume from.
        level: How exactly it does; see `adapt_machine`.
        skipped: Why newer checkpoints were passed over.
        leave_out: Parts of the state not to restore.
        reports: Whether metrics go where the recipe says.
    """
    context, recipe = services.context, services.context.recipe
    trainer.begin_chunk(
        context.ranks,
        services.watchdog,
        resumption(restored, context, leave_out),
        lambda: callback.places(),  # which is made below, and looks at the trainer
    )
    if recipe.evaluation.per_epoch:
        trainer.add_callback(EvaluationsPerEpoch(context.plan, recipe.evaluation.per_epoch))
    lead: CheckpointManager | None = None
    report: LiveReport | None = None
    if context.ranks.is_first:
        lineage = Lineage(context, restored, level, skipped)
        accounting = Accounting.of(context, restored.meta.work if restored else None, lineage.start_step)
        cache = NodeCache.of(recipe.store)
        lead = CheckpointManager(services, trainer, restored, lineage=lineage, accounting=accounting, cache=cache)
        # Before the checkpoint callback: what these do at a step's end is over when its checkpoint is captured.
        if reports:
            folder, newest = services.staging.folder(0), lambda: lineage.parent
            report = observers.attach_observers(context, trainer, folder, lead.live, newest=newest)
    manager = lead or Checkpointer(services)
    schedule = Schedule(
        target=context.target,
        plan=context.plan,
        every_steps=recipe.chunks.every_steps,
        per_epoch=recipe.chunks.checkpoints_per_epoch,
        every_seconds=recipe.chunks.every_seconds,
        pace=Pace() if recipe.chunks.is_continuous else None,
        keep_best=recipe.export.checkpoint == "best",
    )
    callback = CheckpointCallback(trainer, schedule, manager, replicated=not recipe.parallel.is_sharded)
    return Assembly(callback, manager, lead, report)


# --- One attempt at training a chunk, in each of its ranks: fetch, build, restore, train, and wait for the last
# commit.


class Attempt:
    """One attempt at training a chunk, in one rank.

    Args:
        context: The chunk, whose target is not committed yet.
        fetched: What was downloaded for it.
        staging: Folders for downloads and checkpoints.
        watch: Tells that the machine will be preempted.
        scoring: The score of a sweep's trial, None where the run is none.
        leave_out: Parts of the state not to restore: a negative control for tests of exactness.
    """

    def __init__(
        self,
        context: TrainContext,
        fetched: Inputs,
        staging: Staging,
        watch: PreemptionWatch,
        *,
        scoring: Scoring | None,
        leave_out: tuple[str, ...],
    ) -> None:
        self._context = context
        self._fetched, self._restored = fetched, fetched.restored
        self._staging, self._watch = staging, watch
        self._scoring, self._leave_out = scoring, leave_out

    def train(self) -> CheckpointManager | None:
        """Trains to the chunk's target, or as far as it gets.

        Returns:
            The first rank's manager; None in all others.

        Raises:
            BatonError: the state restored differs from the state saved, or the store fails for good.
        """
        restored = self._restored
        level = adapt_machine(restored, self._context.ranks, self._context.recipe)
        trainer = self._build()
        ranks = self._context.ranks
        services = Services(
            context=self._context,
            staging=self._staging,
            watch=self._watch,
            watchdog=Watchdog(ranks, self._context.recipe.parallel.hang_seconds) if ranks.size > 1 else NullWatchdog(),
        )
        attached = assemble(
            trainer, services, restored, level=level, skipped=self._fetched.skipped, leave_out=self._leave_out
        )
        self._context.clock.enter(Phase.RESTORE, step=restored.step if restored else 0)
        try:
            # With a notice before the first step there is nothing to save.
            if not attached.manager.leaves_at_once():
                if restored is None or not restored.is_target:
                    with guard.watch_for_skips(services, trainer, attached.manager):
                        trainer.train(resume_from_checkpoint=restored.folder if restored else None)
                services.watchdog.stop()  # from here the ranks wait for the store alone, which has its own patience
                self._finish(trainer, attached)
        finally:
            attached.close()
        return attached.lead

    def _build(self) -> ChunkTrainer:
        self._context.clock.enter(Phase.BUILD)
        self._context, trainer = build.prepare(
            self._context,
            self._fetched.tokens,
            self._fetched.models,
            self._staging.folder(0),
            code_folder=self._fetched.code,
            start_weights=self._restored is None
            or self._context.recipe.adapter is not None
            or "weights" in self._leave_out,
            evaluates=True if self._scoring else None,
        )
        return trainer

    def _finish(self, trainer: ChunkTrainer, attached: Assembly) -> None:
        """Waits for the last checkpoint's commit; a sweep's trial is scored meanwhile, and its score kept then."""
        try:
            score = self._score(trainer, attached)
        finally:
            # Also where scoring has failed: the checkpoint is on its way, and it is what the chunk was for.
            attached.manager.finish()
        if score and self._scoring:
            # Not before the commit: a score without its checkpoint would be of a state that nobody has.
            self._scoring.keep(score)

    def _score(self, trainer: ChunkTrainer, attached: Assembly) -> Score | None:
        """Scores what a sweep's trial has come to after the chunk; None in all ranks but the first."""
        if self._scoring is None:
            return None
        trainer.remove_callback(attached.callback)  # what it makes of evaluations is for training
        restored = self._restored
        if restored and restored.is_target:
            callback = attached.callback
            return self._scoring.measure_again(
                trainer,
                restored.step,
                restored.folder,
                restore=callback.on_train_begin,
                prove=callback.prove_restored,
            )
        step = trainer.state.global_step
        if step >= self._context.target or attached.callback.finished:
            return self._scoring.measure(trainer, step)
        return None
