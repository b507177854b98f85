"""A chunk is a target, not a delta: the run is trained to step T from the newest valid checkpoint there is.

This module decides who does that: nobody, where the target is committed; the ranks of this machine, which it starts; a
job of several machines; or this process.
"""

from __future__ import annotations

from baton.components.shared.core import machine
from baton.components.shared.core.state import Phase
from baton.components.shared.recipe import Preemption
from baton.components.train_chunk import inputs, trainjob
from baton.components.train_chunk.checkpointing.staging import Staging, clear_left
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.distributed import devices, launcher, rendezvous
from baton.components.train_chunk.distributed.preemption import PreemptionWatch
from baton.components.train_chunk.outcome import Outcome, conclude, without_training
from baton.components.train_chunk.reporting.clock import Clock
from baton.components.train_chunk.reporting.scoring import Scoring


def run_chunk(
    run_uri: str,
    index: int,
    leave_out: tuple[str, ...] = (),
    clock: Clock | None = None,
) -> Outcome | None:
    """Trains a run to the target of a chunk, unless that is committed already.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1; those after the plan's last are spare and have its target.
        leave_out: Parts of the state not to restore: a negative control for tests of exactness.
        clock: The launching process's, in the ranks that it starts.

    Returns:
        What the chunk has come to; None in all ranks but the first, and on all machines but its own.

    Raises:
        BatonError: the state restored differs from the state saved, or the store fails for good.
    """
    machine.share_arenas()
    context = TrainContext.open(run_uri, index, clock)
    recipe, ranks = context.recipe, context.ranks
    if ranks.launched:
        rendezvous.join(ranks, recipe)
    context.clock.enter(Phase.FETCH, chunk=index, target=context.target)
    scoring = Scoring.of(context.run, index, context.clock)
    # One rank asks the store for all: two that saw a commit between their looks would part ways, and one would hang.
    if outcome := ranks.on_first(lambda: without_training(context, scoring)):
        clear_left()  # its predecessor may have been killed after its commit, with a checkpoint in memory
        return outcome
    if trainjob.is_wanted(recipe):
        return trainjob.run(context, scoring)
    machine.require_gpus(recipe.resources.image)
    context.store.require_signer()  # before hours are trained that nobody may restore
    if recipe.world_size > 1 and not ranks.launched:
        return _launch(context, (run_uri, index, leave_out, context.clock))
    devices.pin(recipe, ranks)
    with PreemptionWatch(recipe.chunks.preemption if ranks.leads_node else Preemption()) as watch, Staging() as staging:
        fetched = inputs.fetch(context, staging, to_score=scoring is not None)
        # Not at the top: it imports the training stack, which `fetch` does while it downloads.
        from baton.components.train_chunk.training import Attempt

        attempt = Attempt(context, fetched, staging, watch, scoring=scoring, leave_out=leave_out)
        manager = attempt.train()
        ranks.leave()  # not after a failure: the others may wait in a call, and end with the launcher
    return conclude(context, manager) if manager else None


def _launch(context: TrainContext, arguments: tuple[object, ...]) -> Outcome | None:
    """Runs the chunk in the processes of this machine, and returns what it has come to."""
    processes, name = context.recipe.processes, f"{context.run.name}-{context.index}"
    context.clock.enter(Phase.LAUNCH, processes=processes)
    forks = context.run.storage.is_local
    return launcher.launch(run_chunk, arguments, name=name, processes=processes, forks=forks)
