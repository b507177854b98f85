"""`baton.attach`: trains a script's own trainer in chunks, each an exact part of one run in the store.

The run has no recipe: `attached.json` identifies its checkpoints, and `plan.json` has its length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from baton.checkpoint import retention
from baton.checkpoint.proof import prove
from baton.checkpoint.sharded import code_in
from baton.checkpoint.staging import Staging
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.documents import Json
from baton.errors import OtherRunError, UserError
from baton.recipe import load
from baton.runs.documents import AttachedRun, ProofPart, RunInfo, StagePhase
from baton.runs.run import Run, check_name, now
from baton.runs.versions import RUN_FORMATS, FormatVersions
from baton.store.cache import NodeCache
from baton.train import attempt, inputs
from baton.train.attach import borrow, settings
from baton.train.attach import identity as facts
from baton.train.attach.settings import Target
from baton.train.chunk import Outcome, conclude, without_training
from baton.train.context import Clock, TrainContext
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.distributed.ranks import Ranks

logger = logging.getLogger("baton")


def begin_or_join(run: Run, found: Json, section: Json) -> None:
    """Begins a run, or joins one.

    Raises:
        OtherRunError: it was begun with other facts, which are named, or by a Baton that this one does not continue.
    """
    ours = AttachedRun(
        name=run.name,
        created=now(),
        facts=found,
        chunks=section,
        script=facts.running_script(),
        made=FormatVersions.here(RUN_FORMATS),
    )
    if run.write_new(ours):  # of several processes that begin it at once, one writes; the others join
        return
    before = run.need(AttachedRun)
    before.made.require_continued(f"run {run.name!r}", RUN_FORMATS)
    if changed := load.changed_paths(before.facts, ours.facts):
        is_seed = all(line.startswith("model.begins_with") for line in changed)
        hint = " Seed the generators before the model is built." if is_seed else ""
        raise OtherRunError(
            f"run {run.name!r} was begun with something else: {'; '.join(changed)}.",
            remedy=f"Set these back, or attach to a run of another name.{hint}",
        )
    if before.script.sha256 and before.script.sha256 != ours.script.sha256:
        logger.warning("the script has changed since run %s was begun; what is compared is the same", run.name)


_used: WeakSet[Trainer] = WeakSet()
"""Trainers that this process has trained: their weights and random state are no longer those of the start."""


NOT_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "baton_state")
"""Prefixes of a checkpoint's files that hold no weights."""


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
            leave_out: Parts of the state not to restore, `rng` or `hooks`: a negative control for tests of exactness.

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
            outcome = self._train(leave_out)
            context = self._context
            retention.tidy(context.store, context.recipe.chunks.keep, targets=context.plan.targets)
        elif load:
            self.load(outcome.step)
        # Also where early stopping has ended the run in a chunk before this one.
        if outcome.is_done and (outcome.step >= self.num_steps or self._checkpoint(outcome.step).meta.finished):
            # `Trainer` would look for what `load_best_model_at_end` asks for in its own folder.
            state = self._trainer.state
            best = state.best_global_step if self._trainer.args.load_best_model_at_end else None
            if best and self._context.store.read(best):
                self.load(best)
                self._trainer.state = state
        return outcome

    def _train(self, leave_out: tuple[str, ...]) -> Outcome:
        """Trains to the target, or as far as it gets, and gives the trainer back."""
        context, trainer = self._context, self._trainer
        context.clock.enter(StagePhase.FETCH, chunk=context.index, target=context.target)
        with PreemptionWatch(context.recipe.chunks.preemption) as watch, Staging() as staging:
            restorer = inputs.open_restorer(context, staging, NodeCache.of(context.recipe.store))
            restored = restorer.require_no_code(restorer.fetch())
            if restored is None and trainer in _used:
                raise UserError(
                    f"run {context.run.name!r} has no checkpoint to restore, and this trainer has been trained before.",
                    remedy="Build the trainer again: a run begins with a fresh one.",
                )
            _used.add(trainer)
            restored = inputs.without(restored, leave_out, staging.folder(0))
            with borrow.borrow_trainer(trainer, context.recipe, resumes=restored is not None) as attached:
                checkpointer = attempt.train_chunk(
                    context, restored, restorer.skipped, staging, watch, lambda: (context, attached), is_script=True
                )
                return conclude(context, checkpointer)

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
        self._context.clock.enter(StagePhase.FETCH)
        with Staging() as staging, borrow.borrow_trainer(trainer, self._context.recipe, resumes=True) as attached:
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
            RewritableDamageError: it is not what was committed.
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


def attach(
    trainer: Trainer,
    run_uri: str,
    target: Target = None,
    *,
    checkpoint_every: int | str | None = None,
    chunks: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    deterministic: bool = True,
) -> Chunk:
    """Makes a trainer of your own train in chunks that end on the bits of one uninterrupted run.

    The trainer's arguments define the whole run: its number of steps and its schedule. A chunk ends at its target,
    which is a step of that run and not a number of steps to come.

    Args:
        trainer: A `transformers.Trainer` or one of TRL's, built and not trained yet.
        run_uri: Address of the run, `STORE/runs/NAME`; the store is a folder, `s3://`, `gs://` or `az://`.
        target: Where the chunk ends: a step (`100`), a share of the run (`0.25`), or chunk k of n (`(1, 4)` or
            `"1/4"`); the whole run when left out.
        checkpoint_every: Checkpoints before the target, as `chunks.checkpoint_every` of a recipe: a number of steps, a
            time such as `5m`, or `continuous`. When left out, those of the trainer's `save_strategy`.
        chunks: Further settings of a recipe's section `chunks`: `keep`, `preemption`, `exactness`, `wait_for_commit`,
            `max_unsaved`, `signing`.
        identity: Names and values of your own that must be the same for the run to be resumed, such as a version of
            data that is no table.
        deterministic: Refuse kernels whose result varies from call to call.

    Returns:
        The chunk; nothing is trained yet.

    Raises:
        UserError: the trainer cannot be trained in exact chunks, the target is none of this run, a setting has no
            effect, or the run was begun with something else, which is named.
        StoreError: the store cannot be used.
    """
    settings.require_exact(trainer)
    run, plan = Run.open(run_uri), settings.attached_plan(trainer)
    check_name(run.name)
    run.storage.check()
    if run.read(RunInfo):
        raise UserError(
            f"run {run.name!r} is that of a recipe.", remedy="Attach to a run of another name, or `baton run` goes on."
        )
    step, number = settings.resolve_target(target, plan.num_steps)
    section = settings.chunks_section(trainer, checkpoint_every, plan.num_steps, chunks)
    recipe = settings.attached_recipe(trainer, run, section, deterministic=deterministic)
    found = facts.run_identity(trainer, run.uri, identity)
    begin_or_join(run, found, section)
    run.write_once(plan)
    # A target that names no chunk: its number follows the chunks that ended before this step.
    done = [record.chunk for record in run.attempts() if record.outcome == "done" and record.to_step < step]
    context = TrainContext(
        run=run,
        recipe=recipe,
        plan=plan,
        store=CheckpointStore.of(run, recipe),
        index=number or max(done, default=0) + 1,
        target=step,
        identity=hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest(),
        ranks=Ranks(),
        clock=Clock(),
    )
    return Chunk(trainer, context)
