"""A chunk's outcome, and the record of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum

from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.data import Tokens
from baton.components.train_chunk.checkpointing.manager import CheckpointManager
from baton.components.train_chunk.checkpointing.restore import usable_at_target
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.reporting.accounting import Figures
from baton.components.train_chunk.reporting.scoring import Scoring

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
        record(context, Ending.PARTIAL, step, step)
        return Outcome.at(Ending.STOPPED, context.store, newest)
    committed = usable_at_target(context.store, context.target)
    if committed is None or (scoring and not scoring.is_kept(committed.step)):
        return None
    events.emit(events.AlreadyDone(chunk=context.index, step=committed.step))
    record(context, Ending.ALREADY_DONE, committed.step, committed.step)
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
    record(context, ending, lineage.start_step, lineage.reached, manager.accounting.figures())
    return Outcome.at(ending, context.store, lineage.parent)


def record(context: TrainContext, ending: Ending, from_step: int, to_step: int, figures: Figures | None = None) -> None:
    """Keeps what an attempt did with the run."""
    storage, tokens = context.run.storage, context.run.read(Tokens)
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
