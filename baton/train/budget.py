"""The run's end by its budget: asked after each step, decided once, as late as the rest of the run allows."""

from __future__ import annotations

from collections import deque

from baton.errors import ProcessLostError
from baton.recipe.recipe import Recipe
from baton.runs.documents import Progress, RunCost, RunEnd, RunInfo
from baton.runs.plan import Plan
from baton.runs.run import now
from baton.train.context import TrainContext

RECENT = 64  # steps whose mean is a step's time
STARTS = 3  # of a process: for evaluation, for export, and for one that takes over from a lost one


class BudgetWatch:
    """Adds up device time and decides the run's end, in the first rank."""

    def __init__(self, context: TrainContext, before: RunCost, noted: Progress | None) -> None:
        assert context.recipe.budget
        self._context, self._budget = context, context.recipe.budget
        # The note is later than the checkpoint where a process was killed; both count all processes before this one.
        note = noted or Progress(step=0)
        self._before = max(before.device_seconds, note.device_seconds)
        self.started = before.started or note.started or context.clock.began
        self._step_seconds = note.seconds_per_step  # of the process before, until this one has a step of its own
        self._ends: deque[float] = deque(maxlen=RECENT + 1)
        self._start_seconds = 0.0
        self._elapsed = 0.0  # seconds of this process at the newest step's end
        self._reason: str | None = None

    @property
    def device_seconds(self) -> float:
        """Device time of all chunks so far."""
        return self._after(self._context.clock.total())

    def _after(self, elapsed: float) -> float:
        return self._before + elapsed * self._context.recipe.devices

    def costs(self) -> dict[str, float]:
        """Returns what a checkpoint and a note have of it."""
        return {"started": self.started, "device_seconds": self.device_seconds}

    def on_first_step(self) -> None:
        self._start_seconds = self._context.clock.total()

    def is_due(self, step: int, overhead: float) -> bool:
        """Tells, after each step, whether one more before the end would leave the budget; `overhead` is of a save."""
        training, plan = self._context.recipe.training, self._context.plan
        self._elapsed = self._context.clock.total()
        self._ends.append(self._elapsed)
        if len(self._ends) > 1:
            self._step_seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        ending = training.decay_steps or 0
        if step + max(ending, 1) >= plan.num_steps:
            return False
        self._reason = self._limit_within((ending + 1) * self._step_seconds + overhead + self._reserve)
        return self._reason is not None

    def end_after(self, step: int) -> RunEnd:
        """Returns the end of a run that is due, without the decay where that alone passes the limit."""
        training = self._context.recipe.training
        decay = training.decay_steps
        fits = self._limit_within((decay or 0) * self._step_seconds) is None
        return RunEnd(
            stable_until=step,
            last_step=step + (max(decay or 0, 1) if fits else 1),
            is_decayed=decay is not None and (fits or decay == 0),
            reason=self._reason or "",
            budget=self._budget,
            device_seconds=self._after(self._elapsed),
            chunk=self._context.index,
            created=now(),
        )

    def _limit_within(self, ahead: float) -> str | None:
        """Returns the limit that is passed in some seconds, in words; None for none."""
        elapsed = self._elapsed + ahead
        moment, spent = self._context.clock.began + elapsed, self._after(elapsed)
        return self._budget.passed(moment=moment, started=self.started, device_seconds=spent)

    @property
    def _reserve(self) -> float:
        """Seconds kept for what comes after training."""
        if (given := self._budget.reserve_seconds) is not None:
            return given
        steps = held_out_steps(self._context.recipe, self._context.plan)
        return STARTS * self._start_seconds + steps * self._step_seconds


def held_out_steps(recipe: Recipe, plan: Plan) -> float:
    """Returns the held-out rows in batches of a step, by the shares of the split."""
    train = plan.steps_per_epoch
    shares = [size for size in (recipe.data.split.eval, recipe.data.split.test) if size < 1]
    numbers = sum(size for size in (recipe.data.split.eval, recipe.data.split.test) if size >= 1)
    return train * sum(shares) / (1 - sum(shares)) + numbers / recipe.training.batch_size


def decide(context: TrainContext, end: RunEnd) -> RunEnd:
    """Commits an end, and returns the run's; `ProcessLostError` if another process has decided on an earlier one."""
    first = context.run.decide_end(context.run.need(RunInfo), end)
    if first.stable_until < end.stable_until:
        raise ProcessLostError(
            f"another process has begun the decay after step {first.stable_until}, and this one is at step "
            f"{end.stable_until}; training resumes from there."
        )
    return first
