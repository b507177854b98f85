"""A chunk is a target, not a delta: the run is trained to step T from the newest valid checkpoint.

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
from baton.recipe.run import Preemption
from baton.runs.documents import StagePhase, TokenizedRows
from baton.train import inputs
from baton.train.checkpointer import Checkpointer
from baton.train.context import Clock, TrainContext
from baton.train.distributed import launch
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.metrics.score import Scoring
from baton.train.trainjob import job as elastic
from baton.train.trainjob.cluster import Cluster

logger = logging.getLogger("baton")


class Ending(StrEnum):
    """How a chunk ended.

    Attributes:
        DONE: Its target is committed.
        ALREADY_DONE: Its target was committed before it began, or by another process meanwhile.
        FINISHED: Early stopping ended the run.
        PARTIAL: Its machine is preempted before the target.
        STOPPED: A sweep's trial was asked to stop.
    """

    DONE = "done"
    ALREADY_DONE = "already_done"
    FINISHED = "finished"
    PARTIAL = "partial"
    STOPPED = "stopped"


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


def conclude(context: TrainContext, checkpointer: Checkpointer) -> Outcome:
    """Returns what the first rank's attempt has come to, and records what it cost.

    Raises:
        BatonError: training ended before the target without a reason.
    """
    committer = checkpointer.committer
    assert committer
    index, target, reached = context.index, context.target, committer.reached
    ending, notice = Ending.DONE, checkpointer.notice
    if committer.finished:
        logger.info("evaluation has stopped improving at step %d: the run ends here", reached)
        events.emit(events.Finished(chunk=index, step=reached))
        ending = Ending.FINISHED
    elif committer.lost_race:
        ending = Ending.ALREADY_DONE
    elif reached < target:
        if notice is None:
            raise BatonError(f"chunk {index} ended before its target, step {target}.")
        logger.warning("%s: step %d of %d is saved, the next chunk resumes from it", notice, reached, target)
        events.emit(events.Partial(chunk=index, step=reached, of=target, notice=notice))
        ending = Ending.PARTIAL
    # After the last commit: a process killed before this leaves no record, and its checkpoint counts all the same.
    record_attempt(context, ending, committer.start_step, reached, committer.accounting.figures())
    return Outcome.at(ending, context.store, committer.parent)


def record_attempt(
    context: TrainContext, ending: Ending, from_step: int, to_step: int, figures: dict[str, object] | None = None
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
    if recipe.max_nodes > 1 and not launch.is_node():  # this pod only sees to the job, in whose pods it is False
        return run_trainjob(context, scoring)
    machine.require_gpus(recipe.resources.image)
    context.store.require_signer()  # before hours are trained that nobody may restore
    if recipe.world_size > 1 and not ranks.launched:
        context.clock.enter(StagePhase.LAUNCH, processes=recipe.processes)
        arguments, name = (run_uri, index, leave_out, context.clock), f"{context.run.name}-{index}"
        forks = context.run.storage.is_local
        return launch.launch_ranks(run_chunk, arguments, name=name, processes=recipe.processes, forks=forks)
    launch.pin_device(recipe, ranks)
    with PreemptionWatch(recipe.chunks.preemption if ranks.leads_node else Preemption()) as watch, Staging() as staging:
        fetched = inputs.fetch_inputs(context, staging, to_score=scoring is not None, leave_out=leave_out)
        # Not at the top: it imports the training stack, which `fetch_inputs` does while it downloads.
        from baton.train import attempt

        checkpointer = attempt.train_recipe(context, fetched, staging, watch, scoring)
        ranks.leave()  # not after a failure: the others may wait in a call, and end with the launcher
    return conclude(context, checkpointer) if checkpointer.committer else None
