"""Checks whether these ranks can resume a checkpoint on this machine, and how exactly."""

from __future__ import annotations

import logging

from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError, ExactnessError, UserError
from baton.components.shared.core.fingerprint import Fingerprint
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk.checkpointing.restore import Restored
from baton.components.train_chunk.distributed.ranks import Ranks
from baton.components.train_chunk.trainer import arguments

logger = logging.getLogger("baton")


def adapt(restored: Restored | None, ranks: Ranks, recipe: Recipe) -> str:
    """Sets what bits depend on, and returns how exactly a checkpoint can be resumed here.

    Returns:
        `bitwise`, or `consistent` where the machine differs.

    Raises:
        BatonError: other machines resume from another step.
        UserError: the checkpoint is split over ranks as this chunk's are not.
        ExactnessError: the machine differs, and the recipe asks for bits.
    """
    _require_one_start(ranks, restored)
    # The first chunk's number of threads holds for the run, whatever torch would choose on this machine.
    threads = restored.meta.fingerprint.threads if restored else recipe.training.threads
    arguments.make_deterministic(threads, recipe.training.deterministic)
    if restored is None:
        return "bitwise"
    theirs = restored.meta.fingerprint
    changed = Fingerprint.here(ranks.size, recipe.parallel.strategy).differences(theirs)
    if not changed:
        return "bitwise"
    _require_readable(restored.step, theirs, ranks, recipe)
    if recipe.chunks.exactness == "bitwise":
        raise ExactnessError(
            f"chunks.exactness is bitwise, but this machine differs from the checkpoint's: {'; '.join(changed)}.",
            remedy="Run on the same kind of machine and image, or set chunks.exactness to consistent.",
        )
    logger.warning("this machine differs from the checkpoint's, so bits may differ: %s", "; ".join(changed))
    events.emit(events.Consistent(changed=changed))
    return "consistent"


def _require_one_start(ranks: Ranks, restored: Restored | None) -> None:
    """Checks that all machines resume from the same step; a checkpoint may have come while they looked."""
    steps = ranks.gather(restored.step if restored else 0)
    if len(set(steps)) > 1:
        raise BatonError(f"the machines found different newest checkpoints: {steps}.", remedy="Run again.")


def _require_readable(step: int, theirs: Fingerprint, ranks: Ranks, recipe: Recipe) -> None:
    """Checks that a checkpoint is split over ranks as this chunk's are.

    Raises:
        UserError: it is not.
    """
    now = recipe.parallel.strategy if ranks.size > 1 else "ddp"
    remedy = "Set training.parallel back, or fork the run's exported model."
    if theirs.strategy != now:
        raise UserError(
            f"the checkpoint of step {step} was written with training.parallel.strategy {theirs.strategy}, and this "
            f"chunk has {now}.",
            remedy=remedy,
        )
    if now.startswith("zero") and theirs.world_size != ranks.size:
        raise UserError(
            f"the checkpoint of step {step} was written by {theirs.world_size} processes, and this chunk has "
            f"{ranks.size}: DeepSpeed's optimizer cannot be split over another number.",
            remedy=remedy,
        )
