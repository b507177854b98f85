"""One attempt at training a chunk, in each of its ranks: fetch, build, restore, train, and wait for the last commit."""

from __future__ import annotations

from baton.components.shared.core.state import Phase
from baton.components.train_chunk import skipping
from baton.components.train_chunk.checkpointing import assembly, compatibility
from baton.components.train_chunk.checkpointing.collective import Services
from baton.components.train_chunk.checkpointing.manager import CheckpointManager
from baton.components.train_chunk.checkpointing.staging import Staging
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.distributed.preemption import PreemptionWatch
from baton.components.train_chunk.distributed.watchdog import NullWatchdog, Watchdog
from baton.components.train_chunk.inputs import Inputs
from baton.components.train_chunk.reporting.scoring import Score, Scoring
from baton.components.train_chunk.trainer import preparation
from baton.components.train_chunk.trainer.base import ChunkTrainer


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
        level = compatibility.adapt(restored, self._context.ranks, self._context.recipe)
        trainer = self._build()
        ranks = self._context.ranks
        services = Services(
            context=self._context,
            staging=self._staging,
            watch=self._watch,
            watchdog=Watchdog(ranks, self._context.recipe.parallel.hang_seconds) if ranks.size > 1 else NullWatchdog(),
        )
        attached = assembly.attach(
            trainer, services, restored, level=level, skipped=self._fetched.skipped, leave_out=self._leave_out
        )
        self._context.clock.enter(Phase.RESTORE, step=restored.step if restored else 0)
        try:
            # With a notice before the first step there is nothing to save.
            if not attached.manager.leaves_at_once():
                if restored is None or not restored.is_target:
                    with skipping.watched(services, trainer, attached.manager):
                        trainer.train(resume_from_checkpoint=restored.folder if restored else None)
                services.watchdog.stop()  # from here the ranks wait for the store alone, which has its own patience
                self._finish(trainer, attached)
        finally:
            attached.close()
        return attached.lead

    def _build(self) -> ChunkTrainer:
        self._context.clock.enter(Phase.BUILD)
        self._context, trainer = preparation.prepare(
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

    def _finish(self, trainer: ChunkTrainer, attached: assembly.Assembly) -> None:
        """Waits for the last checkpoint's commit; a sweep's trial is scored meanwhile, and its score kept then."""
        try:
            score = self._score(trainer, attached)
        finally:
            # Also where scoring has failed: the checkpoint is on its way, and it is what the chunk was for.
            attached.manager.finish()
        if score and self._scoring:
            # Not before the commit: a score without its checkpoint would be of a state that nobody has.
            self._scoring.keep(score)

    def _score(self, trainer: ChunkTrainer, attached: assembly.Assembly) -> Score | None:
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
