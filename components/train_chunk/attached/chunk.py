"""A chunk of an attached trainer: what `baton.attach` returns."""

from __future__ import annotations

import dataclasses
import os

from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from baton.components.shared.checkpoints import retention
from baton.components.shared.checkpoints.pickles import code_in
from baton.components.shared.checkpoints.proof import prove
from baton.components.shared.checkpoints.store import Checkpoint
from baton.components.shared.core.errors import UserError
from baton.components.shared.core.state import Phase
from baton.components.shared.runs.documents.training import ProofPart
from baton.components.train_chunk.attached import attempt, taking
from baton.components.train_chunk.checkpointing.staging import Staging
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.outcome import Outcome, without_training
from baton.components.train_chunk.reporting.clock import Clock

NOT_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "baton_state")
"""What names of a checkpoint's files begin with that a model is not made of."""


class Chunk:
    """A stretch of a trainer's run, up to one step.

    Attributes:
        uri: Address of the run.
        target: The step at which the chunk ends.
        num_steps: Steps of the whole run.
        number: The chunk's number.
    """

    def __init__(self, trainer: Trainer, context: TrainContext) -> None:
        self._trainer, self._context = trainer, context
        self.uri = context.run.uri
        self.target, self.num_steps, self.number = context.target, context.plan.num_steps, context.index

    def __repr__(self) -> str:
        return f"<chunk {self.number} of {self.uri}, to step {self.target} of {self.num_steps}>"

    def train(self, *, load: bool = True, leave_out: tuple[str, ...] = ()) -> Outcome:
        """Brings the run to the chunk's target, from the newest checkpoint that is as it was committed.

        It returns at once where the target is committed, and with `partial` where this machine is to be preempted.
        Afterwards the trainer has the class, arguments and callbacks that it had, and the weights of the step reached.

        Args:
            load: Whether to load the weights where there is nothing to train; without, the trainer is left as it is.
            leave_out: Parts of the state not to restore: a negative control for tests of exactness.

        Returns:
            How it ended, and the newest checkpoint.

        Raises:
            ExactnessError: the state restored differs from the state saved.
            BatonError: the store takes no checkpoints, or a step cannot be trained.
        """
        self._context = dataclasses.replace(self._context, clock=Clock())
        self._context.clock.restart()  # what the script did before is its own
        outcome = without_training(self._context, None)
        if outcome is None:
            self._context.store.require_signer()
            outcome = attempt.train(self._trainer, self._context, leave_out)
            context = self._context
            retention.tidy(context.store, context.recipe.chunks.keep, targets=context.plan.targets)
        elif load:
            self.load(outcome.step)
        # Also where early stopping has ended the run in a chunk before this one.
        if outcome.is_done and (outcome.step >= self.num_steps or self._checkpoint(outcome.step).meta.finished):
            self._load_best()
        return outcome

    def load(self, step: int | None = None) -> int:
        """Loads the weights of a checkpoint into the trainer's model, and what it has logged up to there.

        Args:
            step: Its step; that of the newest one when left out.

        Returns:
            Its step.

        Raises:
            UserError: there is no such checkpoint.
            DamagedError: it is not what was committed.
        """
        store, trainer = self._context.store, self._trainer
        checkpoint = self._checkpoint(step)
        checkpoint.require_continued()
        names = [name for name in checkpoint.manifest.files if not os.path.basename(name).startswith(NOT_WEIGHTS)]
        self._context.clock.enter(Phase.FETCH)
        with Staging() as staging, taking.taken(trainer, self._context.recipe, resumes=True) as attached:
            place = os.path.join(staging.folder(checkpoint.bytes), "weights")
            folder = store.fetch(checkpoint, place, names=names)
            store.require_whole(checkpoint, code_in(folder))
            attached._load_from_checkpoint(folder)
            trainer.state = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
        return checkpoint.step

    def prove(self) -> ProofPart:
        """Reads the newest checkpoint back, byte for byte, and writes the chunk's part of the run's resume proof.

        Baton's own pipelines do it beside the next chunk, on a small machine.

        Raises:
            UserError: there is no checkpoint.
            MarkedError: it is not what was committed.
        """
        context = self._context
        return prove(
            context.store,
            self._checkpoint(None),
            context.index,
            context.run.attempts(context.index),
            keep=context.recipe.chunks.keep,
            targets=context.plan.targets,
        )

    def _checkpoint(self, step: int | None) -> Checkpoint:
        store = self._context.store
        checkpoint = store.newest() if step is None else store.read(step)
        if checkpoint is None:
            which = "" if step is None else f" of step {step}"
            there = f"; it has {steps}" if (steps := store.committed_steps()) else ""
            raise UserError(f"run {self.uri!r} has no checkpoint{which}{there}.")
        return checkpoint

    def _load_best(self) -> None:
        """Loads what `load_best_model_at_end` asks for: `Trainer` would look for it in its own folder."""
        best = self._trainer.state.best_global_step
        if self._trainer.args.load_best_model_at_end and best and self._context.store.read(best):
            state = self._trainer.state
            self.load(best)
            self._trainer.state = state
