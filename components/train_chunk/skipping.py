"""Steps that a run's guard does not let pass: kept with the run, by file and line of their rows, for all who resume it.

The first rank writes down a step before its process ends, once for all writers; the next process reads what is there,
restores the newest checkpoint, and skips it. So whoever is killed in between has done no harm: the step is found again,
or is known. A process that was thought gone finds what the others found, and its document stands there already.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator

from baton.components.shared.core import events
from baton.components.shared.core.errors import SkipError, UserError
from baton.components.shared.forks import forking
from baton.components.shared.runs.documents.rows import Place
from baton.components.shared.runs.documents.skips import Skip
from baton.components.shared.runs.run import now
from baton.components.train_chunk.checkpointing.collective import CollectiveCheckpointManager, Services
from baton.components.train_chunk.checkpointing.restore import Restored
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.data import places, step_rows
from baton.components.train_chunk.distributed import devices
from baton.components.train_chunk.trainer.base import ChunkTrainer

logger = logging.getLogger("baton")

MOST_ROWS = 1000
"""Rows that a document names."""


def known(context: TrainContext, restored: Restored | None) -> tuple[int, ...]:
    """Returns the steps that the run's guard has found; those that the recipe names are not among them."""
    steps = [skip.step for skip in context.run.skips()]
    # Of the steps before it the checkpoint says what became of them: it holds the state that followed.
    if restored and (late := sorted(step for step in {*steps} - {*restored.meta.skips} if step <= restored.step)):
        context.run.warn(f"steps {late} were trained before they were found: they are not skipped")
    return tuple(steps)


@contextlib.contextmanager
def watched(services: Services, trainer: ChunkTrainer, manager: CollectiveCheckpointManager) -> Iterator[None]:
    """Has the run know a step that training finds in the block, before this process ends; says of a device that breaks
    after which step it did.

    Raises:
        SkipError: a step is to be skipped, and the run knows it.
        BrokenError: in the place of a device's error.
    """
    context = services.context

    def note(error: SkipError) -> None:
        manager.finish()  # the next process resumes from what is on its way; from here the store has its usual patience
        keep(context, trainer, error)

    try:
        with devices.watched(lambda: int(trainer.state.global_step)):
            yield
    except SkipError as error:
        services.watchdog.stop()
        # All ranks have found it, and wait here: the launcher ends them all as soon as one of them has ended.
        context.ranks.on_first(functools.partial(note, error))
        raise


def keep(context: TrainContext, trainer: ChunkTrainer, error: SkipError) -> None:
    """Keeps with the run that a step is to be skipped, unless another process has.

    Raises:
        UserError: the run has skipped as many steps as it may.
    """
    run, guard = context.run, context.recipe.training.guard
    assert guard is not None
    rows = _rows(context, trainer, error.step)
    skip = Skip(
        step=error.step,
        chunk=context.index,
        reason=error.reason,
        message=error.message,
        loss=_finite(error.loss),
        grad_norm=_finite(error.grad_norm),
        median=_finite(error.median),
        rows=rows[:MOST_ROWS],
        num_rows=len(rows),
        created=now(),
    )
    began = forking.began(run)
    before = [other for other in run.skips() if other.step > began]
    if len(before) >= guard.max_skips and skip.step not in {other.step for other in before}:
        raise _too_many(before, skip, guard.max_skips)
    run.note_skip(skip)
    events.emit(events.StepSkipped(step=skip.step, chunk=skip.chunk, message=skip.message, rows=skip.rows_in_words))


def _rows(context: TrainContext, trainer: ChunkTrainer, step: int) -> list[Place]:
    """Returns where a step's rows come from; what cannot be found out is no reason to train on them."""
    try:
        loader = trainer.callback_handler.train_dataloader
        numbers = step_rows.of_step(loader, context.recipe, context.plan.steps_per_epoch, step)
        return places.of_rows(context.run, context.recipe, numbers)
    except Exception as error:
        logger.warning("the rows of step %d are not known: %s: %s", step, type(error).__name__, error)
        return []


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _too_many(before: list[Skip], last: Skip, most: int) -> UserError:
    """Returns the error of a run that would skip one step more than it may."""
    lines = (
        f"{skip.message.rstrip('.')} ({skip.rows_in_words or 'its rows are not known'})" for skip in (*before, last)
    )
    allowed = "no step" if most == 0 else "1 step" if most == 1 else f"{most} steps"
    return UserError(
        f"training.guard.max_skips allows {allowed} to be skipped, and there is one more: {'; '.join(lines)}.",
        remedy="Raise max_skips and run again; or mend these rows, or lower training.learning_rate where training "
        "diverges, which makes another run.",
    )
