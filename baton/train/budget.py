"""The run's end by its budget: asked after each step, decided once, as late as the rest of the run allows."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from baton.errors import ProcessLostError
from baton.events import EndForeseen
from baton.runs.capacity import capacity_here
from baton.runs.documents import Progress, RunCost, RunEnd, RunInfo
from baton.runs.run import now
from baton.runs.spending import reserve
from baton.train.context import TrainContext

RECENT = 64  # steps whose mean is a step's time
EARLY = 16  # steps before a forecast


class BudgetWatch:
    """Adds up device time and decides the run's end, in the first rank."""

    def __init__(self, context: TrainContext, before: RunCost, noted: Progress | None) -> None:
        assert context.recipe.budget
        self._context, self._budget = context, context.recipe.budget
        # The note is later than the checkpoint where a process was killed; both count all processes before this one.
        note = noted or Progress(step=0)
        self._before = max(before.device_seconds, note.device_seconds)
        self._priced_before = max(before.priced_seconds, note.priced_seconds) or self._before
        self._weight = self._budget.weight(capacity_here(context.recipe))
        self.started = before.started or note.started or context.clock.began
        self._step_seconds = note.seconds_per_step  # of the process before, until this one has a step of its own
        self._ends: deque[float] = deque(maxlen=RECENT + 1)
        self._start_seconds = note.start_seconds
        self._elapsed = 0.0  # seconds of this process at the newest step's end
        self._reason: str | None = None
        self._is_foreseen = False

    def spent(self) -> dict[str, float]:
        """Returns the device time of all chunks so far, as a checkpoint has it."""
        return self._after(self._context.clock.total())

    def _after(self, elapsed: float) -> dict[str, float]:
        now = elapsed * self._context.recipe.devices
        return {"device_seconds": self._before + now, "priced_seconds": self._priced_before + now * self._weight}

    def costs(self) -> dict[str, float]:
        """Returns what a note has of it."""
        now = self._context.clock.total()
        process = {"start_seconds": self._start_seconds, "process_seconds": now, "price": self._weight}
        return {"started": self.started, **process, **self._after(now)}

    def figures(self, steps_left: int) -> dict[str, float]:
        """Returns the cost so far and of the whole run at its pace, in the limit's unit, as trackers have it."""
        spent = self._after(self._context.clock.total())["priced_seconds"]
        rest = steps_left * self._step_seconds * self._context.recipe.devices * self._weight
        amount = self._budget.amount
        return {"budget_spent": amount(spent), "budget_predicted": amount(spent + rest)}

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

    def foresee(self, step: int, overhead: float) -> EndForeseen | None:
        """Returns about where the budget ends the run, once, as soon as the pace of some steps tells it."""
        plan, ending = self._context.plan, max(self._context.recipe.training.decay_steps or 0, 1)
        left = plan.num_steps - step
        if self._is_foreseen or len(self._ends) <= EARLY or ending >= left:
            return None

        def passed(more: int) -> str | None:
            return self._limit_within(more * self._step_seconds + overhead + self._reserve)

        reason = passed(left)
        if reason is None:
            return None
        self._is_foreseen = True
        first_too_many = bisect_left(range(left), True, lo=ending, key=lambda more: passed(more) is not None)
        return EndForeseen(step=step + first_too_many - 1, of=plan.num_steps, reason=reason)

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
            device_seconds=self._after(self._elapsed)["device_seconds"],
            chunk=self._context.index,
            created=now(),
        )

    def _limit_within(self, ahead: float) -> str | None:
        """Returns the limit that is passed in some seconds, in words; None for none."""
        elapsed = self._elapsed + ahead
        moment, spent = self._context.clock.began + elapsed, self._after(elapsed)["priced_seconds"]
        return self._budget.passed(moment=moment, started=self.started, device_seconds=spent)

    @property
    def _reserve(self) -> float:
        return reserve(self._context.recipe, self._context.plan, self._start_seconds, self._step_seconds)


def decide(context: TrainContext, end: RunEnd) -> RunEnd:
    """Commits an end, and returns the run's; `ProcessLostError` if another process has decided on an earlier one."""
    first = context.run.decide_end(context.run.need(RunInfo), end)
    if first.stable_until < end.stable_until:
        raise ProcessLostError(
            f"another process has begun the decay after step {first.stable_until}, and this one is at step "
            f"{end.stable_until}; training resumes from there."
        )
    return first
