"""The stage of a chunk that several nodes train: its own pod only sees to their job."""

from __future__ import annotations

from dataclasses import replace

from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk.checkpointing.restore import committed_at_target
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.distributed import rendezvous
from baton.components.train_chunk.distributed.preemption import PreemptionWatch
from baton.components.train_chunk.outcome import Ending, Outcome
from baton.components.train_chunk.reporting.scoring import Scoring
from baton.components.train_chunk.trainjob import elastic
from baton.components.train_chunk.trainjob.cluster import Cluster


def is_wanted(recipe: Recipe) -> bool:
    """Tells whether this process is to create a job; False in the pods of the job itself."""
    return recipe.max_nodes > 1 and not rendezvous.is_node()


def run(context: TrainContext, scoring: Scoring | None, cluster: Cluster | None = None) -> Outcome:
    """Runs the job of a chunk, whose nodes train to its target.

    Args:
        context: The chunk, whose target is not committed yet.
        scoring: The score of a sweep's trial, None where the run is none.
        cluster: Where; the cluster that this process is a pod of, when left out.

    Raises:
        LostError: nodes were lost, and another job may train to the target.
        BatonError: the job failed, does not start or ended before its target.
    """
    cluster = cluster or Cluster.here()
    index, target, recipe = context.index, context.target, context.recipe
    with PreemptionWatch(recipe.chunks.preemption) as watch:
        job, ended = elastic.run(cluster, recipe, context.run.uri, index, lambda: watch.notice)
    # The store decides: nodes of a job that was deleted, or left early, may have committed the target all the same.
    committed = committed_at_target(context.store, target)
    if committed and (scoring is None or scoring.is_kept(committed.step)):
        return Outcome.at(Ending.DONE, context.store, committed)
    if ended and not job.left_early:
        raise BatonError(f"the TrainJob of chunk {index} ended before its target, step {target}.")
    if not ended and watch.notice is None:
        raise BatonError(f"the TrainJob of chunk {index} was deleted before its target, step {target}.")
    newest = context.store.newest()
    notice = watch.notice or "the nodes were preempted"
    events.emit(events.Partial(chunk=index, step=newest.step if newest else 0, of=target, notice=notice))
    outcome = Outcome.at(Ending.PARTIAL, context.store, newest)
    if watch.notice is None and len(recipe.node_counts) > 1:  # others, or fewer, may be had at once
        return replace(outcome, interrupted=f"nodes of chunk {index} were preempted, step {outcome.step} is saved.")
    return outcome
