"""`baton.attach`: chunks of a trainer that a script of somebody's own has built.

The run has no recipe. `attached.json` says what its checkpoints know each other by, `plan.json` how long it is; all
else is as with any run, and made by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from baton.components.shared.checkpoints.store import CheckpointStore
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run
from baton.components.train_chunk.attached import facts, framing, runs, targets
from baton.components.train_chunk.attached.chunk import Chunk
from baton.components.train_chunk.attached.targets import Target
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.distributed.ranks import Ranks
from baton.components.train_chunk.reporting.clock import Clock


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
    framing.require_exact(trainer)
    run, plan = runs.opened(run_uri), framing.plan(trainer)
    step, number = targets.resolve(target, plan.num_steps)
    section = framing.chunks_section(trainer, checkpoint_every, plan.num_steps, chunks)
    recipe = framing.recipe(trainer, run, section, deterministic=deterministic)
    found = facts.known(trainer, run.uri, identity)
    runs.begin_or_join(run, found, section)
    run.write_once(plan)
    index = number or runs.number(run, step)
    return Chunk(trainer, _context(run, recipe, plan, index=index, target=step, identity=facts.digest(found)))


def _context(run: Run, recipe: Recipe, plan: Plan, *, index: int, target: int, identity: str) -> TrainContext:
    return TrainContext(
        run=run,
        recipe=recipe,
        plan=plan,
        store=CheckpointStore.of(run, recipe),
        index=index,
        target=target,
        identity=identity,
        ranks=Ranks(),
        clock=Clock(),
    )
