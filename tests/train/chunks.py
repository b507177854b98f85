"""A chunk to test parts of it with."""

from __future__ import annotations

from baton.checkpoint.store import CheckpointStore
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.train.context import Clock, TrainContext
from baton.train.distributed import Ranks


def first_chunk(run: Run) -> TrainContext:
    """Returns the only chunk of a run of one step, whose data and model are as good as there."""
    for name in ("data.json", "model.json"):
        run.put(name, {})
    return TrainContext(
        run=run,
        recipe=run.resolved_recipe(),
        plan=Plan(rows=24, steps_per_epoch=1, num_steps=1, targets=(1,)),
        store=CheckpointStore(run),
        index=1,
        target=1,
        identity="made of this",
        ranks=Ranks(),
        clock=Clock(),
    )
