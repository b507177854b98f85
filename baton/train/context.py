"""Context of a chunk in one process: its run, recipe, plan and target, and its seconds by phase."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from baton import events
from baton.checkpoint.store import CheckpointStore
from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.runs.documents import RunEnd, RunInfo, StagePhase
from baton.runs.plan import Plan
from baton.runs.run import Run, state_identity
from baton.store.cache import NodeCache
from baton.train.distributed import Ranks

if TYPE_CHECKING:
    from baton.train.kept import Kept


class Clock:
    """Splits time into phases; the first runs from the process's start to the first `enter`."""

    def __init__(self) -> None:
        self.began: float = psutil.Process().create_time()
        if sys.platform == "linux":
            # psutil adds to a boot time known only to the second, and subtracting that again is exact.
            since_boot: float = self.began - psutil.boot_time()
            self.began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
        self._since = self.began
        self._phase = StagePhase.START
        self.seconds: dict[StagePhase, float] = {}

    def enter(self, phase: StagePhase, **fields: int) -> None:
        """Ends the current phase and starts another; seconds of a phase entered again add up."""
        now = time.time()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
        events.emit(events.Phase(phase=phase.value, **fields))

    def restart(self) -> None:
        """Starts over, as earlier phases ran during another process's work."""
        self.began = self._since = time.time()
        self.seconds = {}

    def total(self) -> float:
        """Seconds since the process started."""
        return time.time() - self.began

    def split(self) -> dict[str, float]:
        running = self.seconds.get(self._phase, 0.0) + time.time() - self._since
        seconds = {**self.seconds, self._phase: running}
        return {phase.value: spent for phase, spent in seconds.items()}

    def trained(self) -> float:
        return self.split().get(StagePhase.TRAIN, 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """One chunk of a run, in one of its processes."""

    run: Run
    recipe: Recipe
    plan: Plan
    store: CheckpointStore
    index: int  # from 1; chunks after the plan's last are spare and have its target
    target: int  # step
    identity: str  # digest of recipe, data, model, code and plan, which a checkpoint must have to be resumed
    ranks: Ranks
    clock: Clock
    end: RunEnd | None = None  # decided for the budget, before this chunk was opened
    kept: Kept | None = None  # of a process that trains other trials too

    @property
    def cache(self) -> NodeCache | None:
        return NodeCache.of(self.recipe.store) or (self.kept.cache if self.kept else None)

    @classmethod
    def open(cls, run_uri: str, index: int, clock: Clock | None = None, kept: Kept | None = None) -> TrainContext:
        """Reads a chunk from the store; `UserError` if it does not exist or this Baton cannot continue the run."""
        clock = clock or Clock()  # before the first request
        run = Run.open(run_uri)
        info = run.need(RunInfo)
        run.require_continued(info)
        recipe, plan = run.resolved_recipe(), run.plan()
        slots = plan.slots(recipe.chunks.spare)
        if not 1 <= index <= slots:
            raise UserError(f"chunk {index} does not exist; the run has {slots}, spare ones included.")
        end, store = None, CheckpointStore.of(run, recipe)
        if recipe.budget or info.voided:
            end, store.withdraws = run.end(info), True
            store.end = end.span if end else None
        return cls(
            run=run,
            recipe=recipe,
            plan=plan,
            store=store,
            index=index,
            target=min(plan.target(index), end.last_step) if end else plan.target(index),
            end=end,
            identity=state_identity(run, recipe, plan),
            ranks=Ranks.here(),
            clock=clock,
            kept=kept,
        )

    @property
    def span(self) -> Plan:
        """The plan with the last step that holds now."""
        return self.plan.until(self.end.last_step) if self.end else self.plan

    def resolved_again(self) -> TrainContext:
        """Returns the chunk with values found out for the run since it was opened, which are part of the identity."""
        recipe = self.run.resolved_recipe()
        return dataclasses.replace(self, recipe=recipe, identity=state_identity(self.run, recipe, self.plan))
