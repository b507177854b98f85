"""One attempt at a chunk of an attached trainer: fetch, restore, train, and wait for the last commit."""

from __future__ import annotations

import functools
from weakref import WeakSet

from transformers import PrinterCallback, Trainer

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.state import Phase
from baton.components.shared.store.cache import NodeCache
from baton.components.train_chunk.attached import taking
from baton.components.train_chunk.checkpointing import assembly, compatibility
from baton.components.train_chunk.checkpointing.collective import Services
from baton.components.train_chunk.checkpointing.restore import Restorer
from baton.components.train_chunk.checkpointing.staging import Staging
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.distributed.preemption import PreemptionWatch
from baton.components.train_chunk.distributed.watchdog import NullWatchdog
from baton.components.train_chunk.outcome import Outcome, conclude

_used: WeakSet[Trainer] = WeakSet()
"""Trainers that a chunk of this process has trained: neither their weights nor the random state are as at the start."""


def train(trainer: Trainer, context: TrainContext, leave_out: tuple[str, ...]) -> Outcome:
    """Trains to the chunk's target, or as far as it gets.

    Args:
        trainer: The trainer, as its script has built it; it is that again afterwards.
        context: The chunk, whose target is not committed yet.
        leave_out: Parts of the state not to restore.

    Raises:
        UserError: the run begins, and the trainer is not fresh.
        BatonError: the state restored differs from the state saved, or the store fails for good.
    """
    recipe, cache = context.recipe, NodeCache.of(context.recipe.store)
    context.clock.enter(Phase.FETCH, chunk=context.index, target=context.target)
    with PreemptionWatch(recipe.chunks.preemption) as watch, Staging() as staging:
        # A folder's own objects and a node's cache need the files as they are.
        alone = cache is None and not context.run.storage.is_local
        place = functools.partial(staging.incoming, alone=alone)
        restorer = Restorer(context.store, context.target, context.identity, cache, place)
        restored = restorer.require_no_code(restorer.fetch())
        if restored is None and trainer in _used:
            raise UserError(
                f"run {context.run.name!r} has no checkpoint to restore, and this trainer has been trained before.",
                remedy="Build the trainer again: a run begins with a fresh one.",
            )
        _used.add(trainer)
        shown = trainer.callback_handler.callbacks[:]
        with taking.taken(trainer, recipe, resumes=restored is not None) as attached:
            level = compatibility.adapt(restored, context.ranks, recipe)
            services = Services(context=context, staging=staging, watch=watch, watchdog=NullWatchdog())
            made = assembly.attach(
                attached,
                services,
                restored,
                level=level,
                skipped=restorer.skipped,
                leave_out=leave_out,
                reports=False,
            )
            assert made.lead
            # Last: prints the log, which Baton's own chunks do without.
            trainer.callback_handler.callbacks += [each for each in shown if isinstance(each, PrinterCallback)]
            context.clock.enter(Phase.RESTORE, step=restored.step if restored else 0)
            try:
                if not made.lead.leaves_at_once():  # with a notice before the first step there is nothing to save
                    trainer.train(resume_from_checkpoint=restored.folder if restored else None)
                    made.lead.finish()
            finally:
                made.close()
            return conclude(context, made.lead)
