"""The context of a chunk: its run, recipe and plan, and the part of it that it trains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baton.components.shared.checkpoints.store import CheckpointStore
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run, state_identity
from baton.components.train_chunk.distributed.ranks import Ranks
from baton.components.train_chunk.reporting.clock import Clock


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """One chunk of a run, in one of its processes.

    Attributes:
        run: The run.
        recipe: Its resolved recipe.
        plan: Its plan.
        store: Its checkpoints.
        index: Number of the chunk, from 1; those after the plan's last are spare and have its target.
        target: Step to which the chunk trains.
        identity: Digest of all that a checkpoint must have been made from to be resumed.
        ranks: This process among those that train together.
        clock: Where the seconds of this process go.
    """

    run: Run
    recipe: Recipe
    plan: Plan
    store: CheckpointStore
    index: int
    target: int
    identity: str
    ranks: Ranks
    clock: Clock

    @classmethod
    def open(cls, run_uri: str, index: int, clock: Clock | None = None) -> TrainContext:
        """Reads a chunk from the store.

        Args:
            run_uri: Address of the run.
            index: Number of the chunk.
            clock: The launching process's, where it has begun.

        Raises:
            UserError: there is no such chunk, or this Baton does not continue what the run was begun with.
        """
        clock = clock or Clock()
        run = Run.open(run_uri)
        run.require_continued()
        recipe, plan = run.resolved_recipe(), run.plan()
        slots = plan.slots(recipe.chunks.spare)
        if not 1 <= index <= slots:
            raise UserError(f"chunk {index} does not exist; the run has {slots}, spare ones included.")
        return cls(
            run=run,
            recipe=recipe,
            plan=plan,
            store=CheckpointStore.of(run, recipe),
            index=index,
            target=plan.target(index),
            identity=state_identity(run, recipe, plan),
            ranks=Ranks.here(),
            clock=clock,
        )

    def resolved_again(self) -> TrainContext:
        """Returns the chunk with what was found out for the run since it was opened."""
        # The identity too: what was found out is part of it, and checkpoints are compared by it.
        recipe = self.run.resolved_recipe()
        return dataclasses.replace(self, recipe=recipe, identity=state_identity(self.run, recipe, self.plan))
