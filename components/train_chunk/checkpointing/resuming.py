"""What a trainer resumes from: the state of a checkpoint, whose it is, and the steps that are skipped."""

from __future__ import annotations

from baton.components.train_chunk import skipping
from baton.components.train_chunk.checkpointing.restore import Restored
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.trainer.base import Resumption
from baton.components.train_chunk.trainer.takeover import Takeover


def resumption(restored: Restored | None, context: TrainContext, leave_out: tuple[str, ...]) -> Resumption:
    """Returns what a trainer resumes from; all ranks must call it.

    Args:
        restored: The checkpoint, None at the start of a run.
        context: The chunk.
        leave_out: Parts of the state not to restore.
    """
    # One rank asks the store for all: they must skip the same steps.
    guard = context.recipe.training.guard
    skips = context.ranks.on_first(lambda: skipping.known(context, restored)) if guard else ()
    if restored is None:
        return Resumption(leave_out=leave_out, skips=skips)
    return Resumption(
        folder=restored.folder,
        digests=restored.meta.state,
        carried=restored.meta.hooks.carried if restored.meta.hooks else {},
        leave_out=leave_out,
        takeover=Takeover.of(restored.folder, restored.meta),
        ranks=restored.meta.fingerprint.world_size,
        strategy=restored.meta.fingerprint.strategy,
        # With virtual workers a checkpoint is that of one process, whatever their number.
        is_reshaped=restored.meta.fingerprint.world_size != context.ranks.size
        and not context.recipe.parallel.virtual_workers,
        skips=skips,
    )
