"""The bill of a run with a budget: paid device time by use, and the price of the same work in other ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import JsonValue

from baton.documents import Json
from baton.recipe.budget import Budget
from baton.runs.documents import AFTER_TRAINING, ChunkRecord, Progress, RunInfo, StageRecord
from baton.runs.run import Run


@dataclass(frozen=True)
class Interruption:
    """A preemption or a kill. Its price is that of steps trained again, and of the next process's start."""

    chunk: int
    step: int  # newest one trained
    outcome: str
    repeated: int  # steps
    seconds: float  # as in `Bill`


@dataclass(frozen=True)
class Bill:
    """Device-seconds, those on spot nodes by their share of the price on demand."""

    budget: Budget
    kept: float
    lost: float  # of steps that were trained again
    starting: float
    saving: float
    after: float  # of evaluation, gate and export, without their start
    waited: float  # seconds between attempts, which cost nothing
    interruptions: Sequence[Interruption]
    on_demand: float  # the same steps in one process on demand, with evaluation, gate and export
    script: float  # see `_without_checkpoints`

    @property
    def total(self) -> float:
        return self.kept + self.lost + self.starting + self.saving + self.after

    @property
    def words(self) -> str:
        cost = self.budget.cost
        return (
            f"{cost(self.total)}: steps kept {cost(self.kept)}, steps lost {cost(self.lost)}, starts "
            f"{cost(self.starting)}, saving {cost(self.saving)}, evaluation and export {cost(self.after)}. On demand "
            f"{cost(self.on_demand)}, as a script without checkpoints {cost(self.script)}"
        )

    def to_json(self) -> Json:
        """Returns costs in the unit of the budget's limit."""
        names = ("kept", "lost", "starting", "saving", "after", "total", "on_demand", "script")
        costs: Json = {name: self.budget.cost(getattr(self, name)) for name in names}
        cut: list[JsonValue] = [
            {
                "chunk": each.chunk,
                "step": each.step,
                "outcome": each.outcome,
                "repeated_steps": each.repeated,
                "cost": self.budget.cost(each.seconds),
            }
            for each in self.interruptions
        ]
        return {**costs, "waited_seconds": round(self.waited, 1), "interruptions": cut}


@dataclass(frozen=True)
class _Attempt:
    record: ChunkRecord
    again: int  # steps that a later attempt has trained again

    @property
    def lost(self) -> float:
        return self.record.training * self.again / self.record.steps if self.record.steps else 0.0

    @property
    def kept(self) -> float:
        return self.record.training - self.lost


def bill(
    run: Run, attempts: Sequence[ChunkRecord] | None = None, stages: Sequence[StageRecord] | None = None
) -> Bill | None:
    """Returns a run's bill; None without a budget, or before an attempt has ended.

    Args:
        run: The run.
        attempts: At all its chunks; read where left out.
        stages: Records of its stages, those before training included; read where left out.
    """
    info = run.read(RunInfo)
    if info is None or not info.recipe.get("budget"):
        return None
    attempts = run.attempts() if attempts is None else attempts
    if not attempts:
        return None
    stages = run.records() if stages is None else stages
    recipe, note = run.recipe(), run.read(Progress)
    assert recipe.budget
    budget, devices = recipe.budget, recipe.devices
    ordered = _in_order(attempts)
    records = [each.record for each in ordered]
    worked = [each for each in ordered if each.record.steps]
    interruptions = []
    for at, each in enumerate(worked):
        if each.record.is_cut:
            starts = sum(later.record.starting * later.record.price for later in worked[at + 1 : at + 2])
            seconds = (each.lost * each.record.price + starts) * devices
            cut = Interruption(each.record.chunk, each.record.to_step, each.record.outcome, each.again, seconds)
            interruptions.append(cut)
    start = fmean(each.record.starting for each in worked) if worked else 0.0
    whole = sum(each.kept for each in ordered) + start
    # On one machine: an accelerator for each of a pod's processes.
    after = sum(stage.total for stage in stages if stage.kind in AFTER_TRAINING) * max(1, recipe.resources.gpus)
    after_priced = after * budget.weight(recipe.resources.capacity)
    began = note.started if note and note.started else min(each.ended - each.total for each in records)
    return Bill(
        budget=budget,
        kept=sum(each.kept * each.record.price for each in ordered) * devices,
        lost=sum(each.lost * each.record.price for each in ordered) * devices,
        starting=sum(each.starting * each.price for each in records) * devices,
        saving=sum(each.saving * each.price for each in records) * devices,
        after=after_priced,
        waited=max(max(each.ended for each in records) - began - sum(each.total for each in records), 0.0),
        interruptions=interruptions,
        on_demand=whole * devices + after,
        script=_without_checkpoints(records, whole) * devices + after_priced,
    )


def _in_order(attempts: Sequence[ChunkRecord]) -> list[_Attempt]:
    """Returns attempts by time."""
    ordered: list[_Attempt] = []
    resumed = None  # earliest step that later attempts begin after
    for record in sorted(attempts, key=lambda each: (each.at, each.chunk), reverse=True):
        if not record.steps:  # found its work done
            ordered.append(_Attempt(record, 0))
            continue
        first = record.to_step if resumed is None else resumed
        ordered.append(_Attempt(record, max(record.to_step - max(first, record.from_step), 0)))
        resumed = min(first, record.from_step)
    return ordered[::-1]


def _without_checkpoints(records: Sequence[ChunkRecord], whole: float) -> float:
    """Returns the seconds, by their price, of a script that saves nothing and meets the same interruptions.

    It starts over after each. With uptimes u1, u2, … until the interruptions, and W for the whole run, it pays for
    those before the first of at least W, and for W. Each uptime has the price of its nodes, and W their mean price.

    Args:
        records: Of attempts, by time.
        whole: Seconds of a run that is not interrupted.
    """
    paid = uptime = priced = 0.0
    for each in records:
        uptime, priced = uptime + each.total, priced + each.total * each.price
        if uptime >= whole:
            break
        if each.is_cut:
            paid, uptime, priced = paid + priced, 0.0, 0.0
    total = sum(each.total for each in records)
    return paid + whole * (sum(each.total * each.price for each in records) / total if total else 1.0)
