"""One attempt at training a chunk, in each rank: resumption, checks, callbacks, and the last commit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PrinterCallback

from baton import events
from baton.checkpoint.restore import FetchedCheckpoint
from baton.checkpoint.staging import Staging
from baton.errors import BatonError, ExactnessError, UserError
from baton.recipe.recipe import Recipe
from baton.runs.documents import OwnState, StagePhase
from baton.runs.versions import Fingerprint
from baton.train import build, guard
from baton.train.callbacks import EvaluationsPerEpoch, Pace, RestoreCheck, SaveAndStop, SaveSchedule
from baton.train.checkpointer import Checkpointer, Committer
from baton.train.context import TrainContext
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.distributed.ranks import Ranks
from baton.train.distributed.watchdog import Watchdog
from baton.train.fork import ForkOverrides
from baton.train.inputs import ChunkInputs
from baton.train.live import LiveReport, attach_observers
from baton.train.protocol import ChunkTrainer, Resumption
from baton.train.score import Score, Scoring

logger = logging.getLogger("baton")

OTHERS = "another number of processes kept it"


def resumption(restored: FetchedCheckpoint | None, context: TrainContext) -> Resumption:
    """Returns a trainer's resumption; all ranks must call it."""
    # One rank asks the store for all: all must skip the same steps.
    guards = context.recipe.training.guard
    skips = context.ranks.on_first(lambda: guard.known_skips(context, restored)) if guards else ()
    if restored is None:
        return Resumption(skips=skips)
    theirs = restored.meta.fingerprint
    return Resumption(
        folder=restored.folder,
        digests=restored.meta.state,
        carried=restored.meta.hooks.carried if restored.meta.hooks else {},
        left_out=restored.left_out,
        takeover=ForkOverrides.of(restored.folder, restored.meta),
        ranks=theirs.world_size,
        strategy=theirs.strategy,
        # With virtual workers a checkpoint is as of one process, whatever the number of ranks.
        is_reshaped=theirs.world_size != context.ranks.size and not context.recipe.parallel.virtual_workers,
        skips=skips,
    )


def adapt_machine(restored: FetchedCheckpoint | None, ranks: Ranks, recipe: Recipe) -> str:
    """Makes this process deterministic, and returns the exactness of a resume here.

    That is `bitwise`, or `consistent` if the machine differs or state of the user's code is not restored.

    Raises:
        BatonError: other machines resume from another step.
        UserError: these ranks cannot read the checkpoint's split.
        ExactnessError: bits may differ, and the recipe requires bitwise.
    """
    # A checkpoint may have been committed between the machines' searches.
    steps = ranks.gather(restored.step if restored else 0)
    if len(set(steps)) > 1:
        raise BatonError(f"the machines found different newest checkpoints: {steps}.", remedy="Run again.")
    # The first chunk's number of threads holds for the whole run, as it decides the order of sums.
    threads = restored.meta.fingerprint.threads if restored else recipe.training.threads
    workers = recipe.parallel.virtual_workers
    if workers and not threads:  # the same number in one process as in several, each with its share of the cores
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
    """Raises `UserError` if these ranks cannot read how a checkpoint is split.

    One rank reads every split, FSDP also a checkpoint of one process, all others only their own strategy.
    """
    now = recipe.parallel.strategy if ranks.size > 1 else "ddp"
    was_alone = theirs.world_size == 1
    if ranks.size > 1 and theirs.strategy != now and not (was_alone and now == "fsdp"):
        how = "by one process" if was_alone else f"with training.parallel.strategy {theirs.strategy}"
        raise UserError(
            f"the checkpoint of step {step} was written {how}, and this chunk has {now}.",
            remedy="Set training.parallel back, train on in one process, or fork the run's exported model.",
        )


@dataclass(frozen=True)
class Assembly:
    """Parts that make a trainer resume, save and, in the first rank, report."""

    checkpointer: Checkpointer
    check: RestoreCheck
    save: SaveAndStop
    report: LiveReport | None

    def close(self) -> None:
        self.checkpointer.close()
        if self.report:
            self.report.close()


def assemble(
    context: TrainContext,
    trainer: ChunkTrainer,
    restored: FetchedCheckpoint | None,
    staging: Staging,
    watch: PreemptionWatch,
    *,
    level: str,
    skipped: list[str],
    reports: bool,
) -> Assembly:
    """Makes a trainer resume at the level of `adapt_machine`, save and report."""
    recipe, ranks, chunks = context.recipe, context.ranks, context.recipe.chunks
    watchdog = Watchdog(ranks, recipe.parallel.hang_seconds)
    committer = Committer(context, restored, level=level, skipped=skipped) if ranks.is_first else None
    checkpointer = Checkpointer(context, staging, watch, watchdog, committer)
    # A lambda, as `save` is made below; the trainer calls it at its first save.
    trainer.begin_chunk(ranks, watchdog, resumption(restored, context), lambda: save.stage())
    if recipe.evaluation.per_epoch:
        trainer.add_callback(EvaluationsPerEpoch(context.plan, recipe.evaluation.per_epoch))
    report = None
    # Before `SaveAndStop`: its checkpoint is captured after these callbacks have done their work at a step's end.
    if committer and reports:
        live, newest = committer.live, lambda: committer.parent
        report = attach_observers(context, trainer, staging.folder(0), live, newest=newest)
    schedule = SaveSchedule(
        target=context.target,
        plan=context.plan,
        every_steps=chunks.every_steps,
        per_epoch=chunks.checkpoints_per_epoch,
        every_seconds=chunks.every_seconds,
        pace=Pace() if chunks.is_continuous else None,
        keep_best=recipe.export.checkpoint == "best",
    )
    check = RestoreCheck(trainer, checkpointer, replicated=not recipe.parallel.is_sharded)
    save = SaveAndStop(trainer, schedule, checkpointer, check)
    return Assembly(checkpointer, check, save, report)


def train_chunk(
    context: TrainContext,
    restored: FetchedCheckpoint | None,
    skipped: list[str],
    staging: Staging,
    watch: PreemptionWatch,
    build_trainer: Callable[[], tuple[TrainContext, ChunkTrainer]],
    *,
    scoring: Scoring | None = None,
    is_script: bool = False,
) -> Checkpointer:
    """Trains to a chunk's target, or until a preemption, and waits for the last commit.

    `build_trainer` returns the chunk as resolved again, and its trainer; `skipped` holds why newer checkpoints were
    passed over. With `is_script` a script has built the trainer, and itself reports and handles errors of devices.
    """
    level = adapt_machine(restored, context.ranks, context.recipe)
    context, trainer = build_trainer()
    made = assemble(context, trainer, restored, staging, watch, level=level, skipped=skipped, reports=not is_script)
    checkpointer = made.checkpointer
    context.clock.enter(StagePhase.RESTORE, step=restored.step if restored else 0)
    try:
        # All ranks decide together; with a notice before the first step there is nothing to save.
        if not checkpointer.is_preempted():
            if restored is None or not restored.is_target:
                with contextlib.nullcontext() if is_script else guard.watch_for_skips(trainer, checkpointer):
                    trainer.train(resume_from_checkpoint=restored.folder if restored else None)
            # From here ranks only wait for the store, which has its own time limits.
            checkpointer.watchdog.stop()
            try:
                score = _score(trainer, made, restored, scoring, context.target) if scoring else None
            finally:
                # Also after a failed score: the checkpoint on its way is the chunk's result.
                checkpointer.finish()
            if score and scoring:
                # After the commit: a crash in between leaves a checkpoint to score, never a score without its state.
                scoring.keep(score)
    finally:
        made.close()
    return checkpointer


def _score(
    trainer: ChunkTrainer, made: Assembly, restored: FetchedCheckpoint | None, scoring: Scoring, target: int
) -> Score | None:
    """Scores a sweep's trial after the chunk; None in all ranks but the first."""
    trainer.remove_callback(made.save)  # it would save and stop by the score's evaluation
    if restored and restored.is_target:
        check = made.check
        return scoring.measure_again(trainer, restored.step, restored.folder, restore=check.restore, prove=check.prove)
    step = trainer.state.global_step
    return scoring.measure(trainer, step) if step >= target or made.save.finished else None


def train_recipe(
    context: TrainContext, fetched: ChunkInputs, staging: Staging, watch: PreemptionWatch, scoring: Scoring | None
) -> Checkpointer:
    """Trains a chunk of a recipe's run with its downloads; see `train_chunk`."""

    def build_trainer() -> tuple[TrainContext, ChunkTrainer]:
        context.clock.enter(StagePhase.BUILD)
        found, trainer = build.prepare(
            context,
            fetched.tokens,
            fetched.models,
            staging.folder(0),
            code_folder=fetched.code,
            start_weights=fetched.restored is None or context.recipe.adapter is not None,
            evaluates=True if scoring else None,
        )
        trainer.remove_callback(PrinterCallback)
        return found, trainer

    return train_chunk(context, fetched.restored, fetched.skipped, staging, watch, build_trainer, scoring=scoring)
