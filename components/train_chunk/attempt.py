"""One attempt at training a chunk, in one process or in each of several: trainer, keeper, handover, and their order."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from components.shared import code, events, fingerprint
from components.shared.errors import BatonError, ExactnessError, UserError
from components.shared.preemption import Watch
from components.shared.recipe import Recipe
from components.train_chunk import pulse
from components.train_chunk.keeping import CheckpointKeeper
from components.train_chunk.restoring import Restored

if TYPE_CHECKING:
    from components.train_chunk.chunk import Chunk
    from components.train_chunk.reporting import LiveReport
    from components.train_chunk.resume import Handover
    from components.train_chunk.scoring import Score

logger = logging.getLogger("baton")


class Attempt:
    """What one process does of it.

    Args:
        chunk: The chunk, which is not there yet.
        watch: Who tells that this machine will be taken away.
    """

    def __init__(self, chunk: Chunk, watch: Watch) -> None:
        self.chunk, self.watch, self.ranks = chunk, watch, chunk.ranks

    @property
    def recipe(self) -> Recipe:
        """The chunk's recipe, which may find its micro-batch size on the way."""
        return self.chunk.recipe

    def train(self) -> CheckpointKeeper | None:
        """Trains to the chunk's target, or as far as it gets.

        Returns:
            What was kept; None in all processes but the first of those that train together.

        Raises:
            BatonError: see `Chunk.bring`.
        """
        from components.train_chunk import arguments
        from components.train_chunk.together import Together

        method = None if self.ranks.leads_node else self.chunk.method()  # while another process fetches
        fetched = self.ranks.node_says(self.chunk.fetch)
        self.chunk.tokens.adopt(fetched.tokens)
        method, restored = method or self.chunk.method(), fetched.restored
        self._require_one_start(restored)
        training = self.recipe.training
        threads = restored.manifest.meta["fingerprint"]["threads"] if restored else training.threads
        arguments.make_deterministic(threads, training.deterministic)
        if restored:
            self._compare_fingerprint(restored)
        if self.recipe.resources.gpus or self.recipe.resources.profile == "mps":
            self.chunk.take_machine()  # its memory may have no room for two models
        self.chunk.clock.enter("build")
        code.install(fetched.code)
        whole_weights = restored is not None and self.recipe.adapter is None
        trainer = method.build(self.chunk.setup(fetched.tokens, fetched.base, start_weights=not whole_weights))
        keeper = CheckpointKeeper(self.chunk, trainer, restored, self.watch) if self.ranks.is_first else None
        report = self._report(trainer, keeper) if keeper else None
        signs = pulse.Pulse(self.ranks, self.recipe.parallel.hang_seconds) if self.ranks.size > 1 else None
        together = Together(self.chunk, keeper, self.watch, signs) if signs else None
        handover = self._handover(trainer, together or keeper, restored, signs)
        if keeper:
            keeper.handover = handover
        self.chunk.take_machine()
        self.chunk.clock.enter("restore", step=restored.step if restored else 0)
        try:
            if together.leaves_at_once() if together else self.watch.notice:
                return keeper  # taken away before it began: there is nothing to save
            if restored is None or not restored.stands:
                trainer.train(resume_from_checkpoint=restored.folder if restored else None)
                if signs:
                    signs.stop()
            self._finish(trainer, handover, restored, keeper)
        finally:
            if keeper and report:
                keeper.close()
                report.close()
        return keeper

    def _require_one_start(self, restored: Restored | None) -> None:
        """Checks that all machines go on from the same step; a checkpoint may have come while they looked."""
        steps = self.ranks.gather(restored.step if restored else 0)
        if len(set(steps)) > 1:
            raise BatonError(f"the machines found different newest checkpoints: {steps}.", remedy="Run again.")

    def _report(self, trainer: Any, keeper: CheckpointKeeper) -> LiveReport:
        """Has the trainer tell the world how it goes."""
        from components.train_chunk.reporting import LiveReport

        report = LiveReport(self.chunk.run, self.recipe, self.chunk.staging.folder(0))
        trainer.add_callback(report)
        if self.recipe.evaluation.write_every:
            from components.train_chunk.writing import Writing

            trainer.add_callback(Writing(self.chunk.run, self.recipe, trainer.processing_class, report))
        report.expose(keeper)
        return report

    def _handover(self, trainer: Any, keeper: Any, restored: Restored | None, signs: pulse.Pulse | None) -> Handover:
        from components.train_chunk.resume import Handover
        from components.train_chunk.takeover import Takeover

        meta = restored.manifest.meta if restored else {}
        return Handover(
            trainer,
            self.chunk.target,
            keeper,
            every_steps=self.recipe.chunks.every_steps,
            every_seconds=self.recipe.chunks.every_seconds,
            resume_from=restored.folder if restored else None,
            expected=meta.get("state"),
            leave_out=self.chunk.leave_out,
            takeover=Takeover.of(restored.folder, restored.manifest) if restored else None,
            keep_best=self.recipe.export.checkpoint == "best",
            ranks=self.ranks,
            pulse=signs,
            replicated=not self.recipe.parallel.is_sharded,
            saved_by=meta.get("fingerprint", {}).get("world_size", 1),
        )

    def _finish(
        self, trainer: Any, handover: Handover, restored: Restored | None, keeper: CheckpointKeeper | None
    ) -> None:
        """Waits for the last checkpoint's commit; a sweep's trial is scored meanwhile, and its score kept then."""
        try:
            score = self._score(trainer, handover, restored)
        finally:
            if keeper:
                keeper.finish()
        if score and self.chunk.scoring:
            self.chunk.scoring.keep(self.chunk, score)

    def _score(self, trainer: Any, handover: Handover, restored: Restored | None) -> Score | None:
        """Scores what a sweep's trial has come to behind the chunk; None in all processes but the first."""
        scoring, step = self.chunk.scoring, trainer.state.global_step
        if scoring is None:
            return None
        trainer.remove_callback(handover)  # it is over: what it makes of evaluations is for training
        if restored and restored.stands:
            return scoring.again(self.chunk, trainer, restored)
        if step >= self.chunk.target or handover.finished:
            return scoring.measure(self.chunk, trainer, step)
        return None

    def _compare_fingerprint(self, restored: Restored) -> None:
        theirs = restored.manifest.meta["fingerprint"]
        changed = fingerprint.differences(self.chunk.fingerprint(), theirs)
        if not changed:
            return
        self._require_readable(restored.step, theirs)
        if self.recipe.chunks.exactness == "bitwise":
            raise ExactnessError(
                f"chunks.exactness is bitwise, but this machine differs from the checkpoint's: {'; '.join(changed)}.",
                remedy="Run on the same kind of machine and image, or set chunks.exactness to consistent.",
            )
        self.chunk.level = "consistent"
        logger.warning("this machine differs from the checkpoint's, so bits may differ: %s", "; ".join(changed))
        events.emit("consistent", changed=changed)

    def _require_readable(self, step: int, theirs: dict[str, Any]) -> None:
        """Checks that a checkpoint is split over processes as this chunk's are.

        Raises:
            UserError: it is not.
        """
        before, now = theirs.get("strategy", "ddp"), self.recipe.parallel.strategy if self.ranks.size > 1 else "ddp"
        remedy = "Set training.parallel back, or fork the run's exported model."
        if before != now:
            raise UserError(
                f"the checkpoint of step {step} was written with training.parallel.strategy {before}, and this chunk "
                f"has {now}.",
                remedy=remedy,
            )
        if now.startswith("zero") and theirs["world_size"] != self.ranks.size:
            raise UserError(
                f"the checkpoint of step {step} was written by {theirs['world_size']} processes, and this chunk has "
                f"{self.ranks.size}: DeepSpeed's optimizer cannot be split over another number.",
                remedy=remedy,
            )
