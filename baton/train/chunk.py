"""A chunk as a target: the run is trained to step T from the newest valid checkpoint.

Nobody trains if the target is committed. Else this process trains, or ranks on this machine, or a job of several
machines. The module also records the outcome of an attempt.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import StrEnum

from baton import events, machine
from baton.checkpoint.restore import committed_at_target, usable_at_target
from baton.checkpoint.staging import Staging, clear_left
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError
from baton.recipe.recipe import Recipe
from baton.recipe.run import Preemption
from baton.runs.documents import StagePhase, TokenizedRows
from baton.train import inputs
from baton.train.checkpointer import CheckpointManager
from baton.train.context import Clock, TrainContext
from baton.train.distributed import launch
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.metrics.accounting import Figures
from baton.train.metrics.score import Scoring
from baton.train.trainjob import job as elastic
from baton.train.trainjob.cluster import Cluster

# --- A chunk's outcome, and the record of it.


logger = logging.getLogger("baton")


class Ending(StrEnum):
    """How a chunk ended."""

    DONE = "done"
    """Its target is committed."""
    ALREADY_DONE = "already_done"
    """Its target was committed before it began, or by another process meanwhile."""
    FINISHED = "finished"
    """Early stopping ended the run."""
    PARTIAL = "partial"
    """Its machine is preempted before the target."""
    STOPPED = "stopped"
    """A sweep's trial was asked to stop."""


@dataclass(frozen=True)
class Outcome:
    """A chunk's ending, the step that it reached and the checkpoint there.

    Attributes:
        ending: How it ended.
        uri: Address of the run's newest checkpoint, that of the run where there is none.
        step: Its step, 0 where there is none.
        digest: Digest of its state, empty where there is none.
        interrupted: What it left early for, where another attempt may follow in this pod; empty where none may.
    """

    ending: Ending
    uri: str
    step: int = 0
    digest: str = ""
    interrupted: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the target is committed, or the run has ended before it."""
        return self.ending in (Ending.DONE, Ending.ALREADY_DONE, Ending.FINISHED)

    @classmethod
    def at(cls, ending: Ending, store: CheckpointStore, checkpoint: Checkpoint | None) -> Outcome:
        """Returns the outcome of a chunk that has come to a checkpoint, or to none."""
        if checkpoint is None:
            return cls(ending, store.run.uri)
        return cls(ending, store.uri(checkpoint), checkpoint.step, checkpoint.digest)


def without_training(context: TrainContext, scoring: Scoring | None) -> Outcome | None:
    """Returns what the chunk has come to where there is nothing to train, None where there is."""
    if scoring and scoring.is_stopped():
        newest = context.store.newest()
        step = newest.step if newest else 0
        events.emit(events.Stopped(chunk=context.index, step=step))
        record_attempt(context, Ending.PARTIAL, step, step)
        return Outcome.at(Ending.STOPPED, context.store, newest)
    committed = usable_at_target(context.store, context.target)
    if committed is None or (scoring and not scoring.is_kept(committed.step)):
        return None
    events.emit(events.AlreadyDone(chunk=context.index, step=committed.step))
    record_attempt(context, Ending.ALREADY_DONE, committed.step, committed.step)
    return Outcome.at(Ending.ALREADY_DONE, context.store, committed)


def conclude(context: TrainContext, manager: CheckpointManager) -> Outcome:
    """Returns what an attempt has come to, and records what it cost.

    Args:
        context: The chunk.
        manager: The first rank's, at its end.

    Raises:
        BatonError: training ended before the target without a reason.
    """
    lineage = manager.lineage
    ending = _ending(context, manager)
    # After the last commit: a process killed before this leaves no record, and its checkpoint counts all the same.
    record_attempt(context, ending, lineage.start_step, lineage.reached, manager.accounting.figures())
    return Outcome.at(ending, context.store, lineage.parent)


def record_attempt(
    context: TrainContext, ending: Ending, from_step: int, to_step: int, figures: Figures | None = None
) -> None:
    """Keeps what an attempt did with the run."""
    storage, tokens = context.run.storage, context.run.read(TokenizedRows)
    context.run.record(
        f"train-chunk-{context.index:03d}",
        {
            "chunk": context.index,
            "from_step": from_step,
            "to_step": to_step,
            "outcome": ending.value,
            "seconds": context.clock.split(),
            "total_seconds": context.clock.total(),
            "tokens": tokens.tokens if tokens else 0,  # a script's own rows are not counted
            "bytes_sent": storage.sent,
            "bytes_received": storage.received,
            **(figures or {}),
        },
    )


def _ending(context: TrainContext, manager: CheckpointManager) -> Ending:
    index, target, reached = context.index, context.target, manager.lineage.reached
    if manager.finished:
        logger.info("evaluation has stopped improving at step %d: the run ends here", reached)
        events.emit(events.Finished(chunk=index, step=reached))
        return Ending.FINISHED
    if manager.overtaken:
        return Ending.ALREADY_DONE
    if reached >= target:
        return Ending.DONE
    if manager.notice is None:
        raise BatonError(f"chunk {index} ended before its target, step {target}.")
    logger.warning("%s: step %d of %d is saved, the next chunk resumes from it", manager.notice, reached, target)
    events.emit(events.Partial(chunk=index, step=reached, of=target, notice=manager.notice))
    return Ending.PARTIAL


# --- The stage of a chunk that several nodes train: its own pod only sees to their job.


def wants_trainjob(recipe: Recipe) -> bool:
    """Tells whether this process is to create a job; False in the pods of the job itself."""
    return recipe.max_nodes > 1 and not launch.is_node()


def run_trainjob(context: TrainContext, scoring: Scoring | None, cluster: Cluster | None = None) -> Outcome:
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
        job, ended = elastic.run_job(cluster, recipe, context.run.uri, index, lambda: watch.notice)
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


# --- A chunk is a target, not a delta: the run is trained to step T from the newest valid checkpoint there is.
#
# This module decides who does that: nobody, where the target is committed; the ranks of this machine, which it starts;
# a job of several machines; or this process.


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
        launch.join_ranks(ranks, recipe)
    context.clock.enter(StagePhase.FETCH, chunk=index, target=context.target)
    scoring = Scoring.of(context.run, index, context.clock)
    # One rank asks the store for all: two that saw a commit between their looks would part ways, and one would hang.
    if outcome := ranks.on_first(lambda: without_training(context, scoring)):
        clear_left()  # its predecessor may have been killed after its commit, with a checkpoint in memory
        return outcome
    if wants_trainjob(recipe):
        return run_trainjob(context, scoring)
    machine.require_gpus(recipe.resources.image)
    context.store.require_signer()  # before hours are trained that nobody may restore
    if recipe.world_size > 1 and not ranks.launched:
        return _launch(context, (run_uri, index, leave_out, context.clock))
    launch.pin_device(recipe, ranks)
    with PreemptionWatch(recipe.chunks.preemption if ranks.leads_node else Preemption()) as watch, Staging() as staging:
        fetched = inputs.fetch_inputs(context, staging, to_score=scoring is not None)
        # Not at the top: it imports the training stack, which `fetch` does while it downloads.
        from baton.train.attempt import Attempt

        attempt = Attempt(context, fetched, staging, watch, scoring=scoring, leave_out=leave_out)
        manager = attempt.train()
        ranks.leave()  # not after a failure: the others may wait in a call, and end with the launcher
    return conclude(context, manager) if manager else None


def _launch(context: TrainContext, arguments: tuple[object, ...]) -> Outcome | None:
    """Runs the chunk in the processes of this machine, and returns what it has come to."""
    processes, name = context.recipe.processes, f"{context.run.name}-{context.index}"
    context.clock.enter(StagePhase.LAUNCH, processes=processes)
    forks = context.run.storage.is_local
    return launch.launch_ranks(run_chunk, arguments, name=name, processes=processes, forks=forks)
