"""A chunk is a target, not a delta: trains the run to step T from the newest valid checkpoint.

Nothing is trained if the target is committed. Otherwise this process trains, or ranks that it starts on this machine,
or a job of several machines.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import StrEnum

from baton import events, machine
from baton.checkpoint import seals
from baton.checkpoint.restore import committed_at_target, usable_at_target
from baton.checkpoint.staging import Staging, clear_left
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError
from baton.recipe.run import Preemption
from baton.runs import objects
from baton.runs.capacity import capacity_here
from baton.runs.documents import StagePhase, TokenizedRows
from baton.train import distributed, inputs, trainjob
from baton.train.checkpointer import Checkpointer
from baton.train.context import Clock, TrainContext
from baton.train.kept import Kept
from baton.train.preemption import PreemptionWatch
from baton.train.score import Scoring

logger = logging.getLogger("baton")


class Ending(StrEnum):
    DONE = "done"
    ALREADY_DONE = "already_done"  # committed before it began, or by another process meanwhile
    FINISHED = "finished"  # early stopping ended the run
    PARTIAL = "partial"  # preempted before the target
    STOPPED = "stopped"  # a sweep's trial was asked to stop


@dataclass(frozen=True)
class Outcome:
    """A chunk's ending, and its newest checkpoint; without one `uri` is the run's.

    `interrupted` is the reason for an early end after which this pod may try again, else empty.
    """

    ending: Ending
    uri: str
    step: int = 0
    digest: str = ""
    interrupted: str = ""
    notice: str = ""  # of a preemption, also one that came too late to end the chunk early

    @property
    def is_done(self) -> bool:
        return self.ending in (Ending.DONE, Ending.ALREADY_DONE, Ending.FINISHED)

    @classmethod
    def at(cls, ending: Ending, store: CheckpointStore, checkpoint: Checkpoint | None) -> Outcome:
        if checkpoint is None:
            return cls(ending, store.run.uri)
        if ledger := seals.ledger_of(store.run):
            ledger.note(f"checkpoints/step-{checkpoint.step:08d}", checkpoint.manifest)
        return cls(ending, store.uri(checkpoint), checkpoint.step, checkpoint.digest)


def without_training(context: TrainContext, scoring: Scoring | None) -> Outcome | None:
    """Returns the outcome of a chunk with nothing to train, else None."""
    if scoring and scoring.is_stopped():
        newest = context.store.newest()
        step = newest.step if newest else 0
        events.emit(events.Stopped(chunk=context.index, step=step))
        record_attempt(context, Ending.PARTIAL, step, step)
        return Outcome.at(Ending.STOPPED, context.store, newest)
    is_last = context.index == len(context.plan.targets)  # once a start, and not by each spare slot
    committed = usable_at_target(context.store, context.target, is_last=is_last)
    if committed is None or (scoring and not scoring.is_kept(committed.step)):
        return None
    events.emit(events.AlreadyDone(chunk=context.index, step=min(context.target, committed.step)))
    record_attempt(context, Ending.ALREADY_DONE, committed.step, committed.step)
    return Outcome.at(Ending.ALREADY_DONE, context.store, committed)


def conclude(context: TrainContext, checkpointer: Checkpointer) -> Outcome:
    """Returns the outcome of the first rank's attempt, and records it; `BatonError` for an early end without reason."""
    committer = checkpointer.committer
    assert committer
    index, target, reached = context.index, context.target, committer.reached
    ending, notice = Ending.DONE, checkpointer.notice
    if committer.finished:
        reason = committer.end.reason if committer.end else None
        logger.info("%s: the run ends here, at step %d", reason or "evaluation has stopped improving", reached)
        events.emit(events.Finished(chunk=index, step=reached, reason=reason))
        ending = Ending.FINISHED
    elif committer.lost_race:
        ending = Ending.ALREADY_DONE
    elif reached < target:
        if notice is None:
            raise BatonError(f"chunk {index} ended before its target, step {target}.")
        logger.warning("%s: step %d of %d is saved, the next chunk resumes from it", notice, reached, target)
        events.emit(events.Partial(chunk=index, step=reached, of=target, notice=notice))
        ending = Ending.PARTIAL
    # After the last commit: a process killed before this line has no record, but its checkpoint counts.
    record_attempt(context, ending, committer.start_step, reached, committer.accounting.figures())
    return replace(Outcome.at(ending, context.store, committer.parent), notice=notice or "")


def record_attempt(
    context: TrainContext, ending: Ending, from_step: int, to_step: int, figures: dict[str, object] | None = None
) -> None:
    """Records an attempt in the run."""
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
            **({"price": context.recipe.budget.weight(capacity_here(context.recipe))} if context.recipe.budget else {}),
            **(figures or {}),
        },
    )


def run_trainjob(context: TrainContext, scoring: Scoring | None, cluster: trainjob.Cluster | None = None) -> Outcome:
    """Runs a chunk's job, whose nodes train to the target; `cluster` is by default this pod's own.

    `LostError` if nodes were lost and another job may train to the target.
    """
    cluster = cluster or trainjob.Cluster.here()
    index, target, recipe = context.index, context.target, context.recipe
    with PreemptionWatch(recipe.chunks.preemption) as watch:
        job, ended = trainjob.run_job(cluster, recipe, context.run.uri, index, lambda: watch.notice)
    # The store decides: nodes of a job that was deleted or left early may still have committed the target.
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
    if watch.notice is None and len(recipe.node_counts) > 1:  # other nodes, or fewer, may be available at once
        return replace(outcome, interrupted=f"nodes of chunk {index} were preempted, step {outcome.step} is saved.")
    return outcome


@seals.sealed(objects.CHUNK)
def run_chunk(
    run_uri: str,
    index: int,
    leave_out: tuple[str, ...] = (),
    clock: Clock | None = None,
    kept: Kept | None = None,
) -> Outcome | None:
    """Trains a run to a chunk's target, unless that is committed.

    Returns the outcome in the first rank, None in all others. Leaving out parts of the restored state is a negative
    control for tests of exactness. Ranks that a process launches get its clock; `kept` has models of earlier chunks.
    """
    machine.share_arenas()
    context = TrainContext.open(run_uri, index, clock, kept)
    recipe, ranks = context.recipe, context.ranks
    if (ledger := seals.ledger_of(context.run)) and ranks.rank:
        ledger.appends = False
    if ranks.launched:
        distributed.join_ranks(ranks, recipe)
    context.clock.enter(StagePhase.FETCH, chunk=index, target=context.target)
    scoring = Scoring.of(context.run, index, context.clock)
    # One rank asks the store for all: with a commit between the questions of two, one would train, and hang alone.
    if outcome := ranks.on_first(lambda: without_training(context, scoring)):
        clear_left()  # an attempt killed after its commit may have left a checkpoint in memory
        return outcome
    follows_job = recipe.max_nodes > 1 and not distributed.is_node()
    if ledger and (follows_job or (recipe.world_size > 1 and not ranks.launched)):
        ledger.appends = False  # of several processes the first rank seals the chunk
    if follows_job:  # this pod only runs the job; the job's pods are nodes
        return run_trainjob(context, scoring)
    machine.require_gpus(recipe.resources.image)
    context.store.require_signer()  # before hours of training that could not be committed
    if recipe.world_size > 1 and not ranks.launched:
        context.clock.enter(StagePhase.LAUNCH, processes=recipe.processes)
        arguments, name = (run_uri, index, leave_out, context.clock), f"{context.run.name}-{index}"
        forks = context.run.storage.is_local
        return distributed.launch_ranks(run_chunk, arguments, name=name, processes=recipe.processes, forks=forks)
    distributed.pin_device(recipe, ranks)
    with PreemptionWatch(recipe.chunks.preemption if ranks.leads_node else Preemption()) as watch, Staging() as staging:
        fetched = inputs.fetch_inputs(context, staging, to_score=scoring is not None, leave_out=leave_out)
        # Imported here: it needs the training stack, which `fetch_inputs` imports during the downloads.
        from baton.train import attempt

        checkpointer = attempt.train_recipe(context, fetched, staging, watch, scoring)
        ranks.leave()  # not after a failure: others may wait in a collective call, and the launcher ends them
    return conclude(context, checkpointer) if checkpointer.committer else None
