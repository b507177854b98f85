"""Checks whether these ranks can resume a checkpoint on this machine, and how exactly."""

from __future__ import annotations

import logging
import os

from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError, ExactnessError, UserError
from baton.components.shared.core.fingerprint import Fingerprint
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.training import OwnState
from baton.components.train_chunk.checkpointing.restore import Restored
from baton.components.train_chunk.distributed.ranks import Ranks
from baton.components.train_chunk.trainer import arguments

logger = logging.getLogger("baton")

OTHERS = "another number of processes kept it"


def adapt(restored: Restored | None, ranks: Ranks, recipe: Recipe) -> str:
    """Sets what bits depend on, and returns how exactly a checkpoint can be resumed here.

    Returns:
        `bitwise`, or `consistent` where the machine differs or state of the user's code is not restored.

    Raises:
        BatonError: other machines resume from another step.
        UserError: the checkpoint is split over ranks as this chunk's are not.
        ExactnessError: bits may differ, and the recipe asks for bits.
    """
    # A checkpoint may have come while they looked.
    steps = ranks.gather(restored.step if restored else 0)
    if len(set(steps)) > 1:
        raise BatonError(f"the machines found different newest checkpoints: {steps}.", remedy="Run again.")
    # The first chunk's number of threads holds for the run, whatever torch would choose on this machine.
    threads = restored.meta.fingerprint.threads if restored else recipe.training.threads
    workers = recipe.parallel.virtual_workers
    if workers and not threads:  # as many for one process as for several, each of which has its share of the cores
        threads = max(1, (os.cpu_count() or 1) // workers)
    arguments.make_deterministic(threads, recipe.training.deterministic, tf32=arguments.uses_tf32(recipe))
    if restored is None:
        return "bitwise"
    theirs = restored.meta.fingerprint
    changed = Fingerprint.here(ranks.size, recipe.parallel.strategy, workers).differences(theirs)
    own = restored.meta.hooks or OwnState()
    lost = own.lost if theirs.world_size == ranks.size else {**dict.fromkeys(own.carried, OTHERS), **own.lost}
    if lost:
        if recipe.chunks.exactness == "bitwise":
            raise ExactnessError(
                "chunks.exactness is bitwise, but "
                f"{'; '.join(f'state of `{name}` is not carried: {why}' for name, why in lost.items())}.",
                remedy=f"{events.NotCarried.REMEDY} Or set chunks.exactness to consistent.",
            )
        events.emit(events.NotCarried(step=restored.step, lost=lost))
    if not changed:
        return "consistent" if lost else "bitwise"
    _require_readable(restored.step, theirs, ranks, recipe)
    if recipe.chunks.exactness == "bitwise":
        raise ExactnessError(
            f"chunks.exactness is bitwise, but this machine differs from the checkpoint's: {'; '.join(changed)}.",
            remedy="Run on the same kind of machine and image, or set chunks.exactness to consistent.",
        )
    logger.warning("this machine differs from the checkpoint's, so bits may differ: %s", "; ".join(changed))
    events.emit(events.Consistent(changed=changed))
    return "consistent"


def _require_readable(step: int, theirs: Fingerprint, ranks: Ranks, recipe: Recipe) -> None:
    """Checks that a checkpoint is split over ranks as this chunk's are, over however many.

    One rank reads what any have split, and FSDP splits what one has written.

    Raises:
        UserError: it is not.
    """
    now = recipe.parallel.strategy if ranks.size > 1 else "ddp"
    was_alone = theirs.world_size == 1
    if ranks.size > 1 and theirs.strategy != now and not (was_alone and now == "fsdp"):
        how = "by one process" if was_alone else f"with training.parallel.strategy {theirs.strategy}"
        raise UserError(
            f"the checkpoint of step {step} was written {how}, and this chunk has {now}.",
            remedy="Set training.parallel back, train on in one process, or fork the run's exported model.",
        )
