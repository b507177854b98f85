"""Time and price of a run before it starts, from what its steps and stages took elsewhere.

Interruptions come at a rate, as a Poisson process; a run goes on from its newest checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from baton.documents import Json
from baton.recipe.recipe import Recipe
from baton.runs.capacity import MACHINE_S
from baton.runs.documents import AFTER_TRAINING, RunInfo, StageRecord, moment
from baton.runs.plan import Plan, make_plan
from baton.runs.run import Run
from baton.runs.spending import reserve, save_interval

RUNS = 2000  # simulated
SHARE = 0.9  # of them within the range
VARIES = 0.1  # share by which all times of another run on the same machine are longer or shorter, at most
FAR = 0.05  # of the time: another interval between checkpoints is better by that much
MOST = 1000  # times the cost with checkpoints, of a script that ends
HOPELESS = 30.0  # interruptions in a time that is to pass without one: more change no word of a forecast
TINY = 1e-3
DAY = 86400.0
# Settings of `training` that change no step's time.
NEUTRAL = {
    *("learning_rate", "epochs", "max_steps", "lr_scheduler", "lr_scheduler_options"),
    *("warmup_steps", "weight_decay", "early_stopping", "guard", "max_grad_norm"),
}


@dataclass(frozen=True)
class Measured:
    """Seconds of a run's parts."""

    source: str  # in words
    paces: tuple[float, ...]  # of a step, by attempt
    first_start: float  # of the first process, until its first step
    start: float  # of a later process
    end: float  # of a process after its last step
    pause: float  # between two processes
    before: float  # of stages before training, with their start
    after: float  # of evaluation, gate and export
    save: float  # that a checkpoint holds training
    plan: Plan
    evaluation: float = 0.0  # of one during training, where `paces` leave it out
    interruptions_per_day: float | None = None  # of the run itself; None where it was too short to tell

    @property
    def step(self) -> float:
        return fmean(self.paces)


def measured(run: Run, source: str) -> Measured | None:
    """Returns the times of a run of this store, None without a whole attempt.

    Args:
        run: The run.
        source: What to call it.
    """
    plan, attempts = run.read(Plan), sorted(run.attempts(), key=lambda each: each.at)
    whole = [each for each in attempts if each.outcome in ("done", "finished") and each.steps]
    if plan is None or not whole:
        return None
    stages = [record for record in run.records() if record.chunk is None]
    after = [stage for stage in stages if stage.kind in AFTER_TRAINING]
    before = [stage for stage in stages if stage.kind not in AFTER_TRAINING]
    began, ended = attempts[0].ended - attempts[0].total, attempts[-1].ended
    starts, cut = [each.starting for each in whole], sum(each.is_cut for each in attempts)
    pauses = [later.ended - later.total - each.ended for each, later in pairwise(whole)]
    holds = [seconds for each in whole for seconds in each.save_stalls]
    return Measured(
        source=source,
        paces=tuple(each.training / each.steps for each in whole),
        first_start=starts[0],
        start=median(starts[1:] or starts),
        end=median(each.saving for each in whole),
        pause=max(median(pauses), 0.0) if pauses else 0.0,
        before=_lasted(before, began - moment(run.need(RunInfo).created)),
        after=_lasted(after, max((moment(stage.at) for stage in after), default=ended) - ended),
        save=median(holds) if holds else 0.0,
        plan=plan,
        interruptions_per_day=cut / sum(each.total for each in attempts) * DAY if cut else None,
    )


def _lasted(stages: Sequence[StageRecord], clock: float) -> float:
    """Returns the seconds of stages by the clock, with at most a machine's start for each: others were a stop."""
    within = sum(stage.total for stage in stages)
    return min(max(clock, within), within + MACHINE_S * len(stages))


def is_alike(recipe: Recipe, other: Recipe) -> bool:
    """Tells whether steps of two recipes take the same time on the same machine."""
    return _kind(recipe) == _kind(other)


def _kind(recipe: Recipe) -> Json:
    document = recipe.model_dump(mode="json")
    resources = {name: document["resources"][name] for name in ("accelerator", "gpus", "nodes", "node_selector")}
    training = {name: value for name, value in document["training"].items() if name not in NEUTRAL}
    return {"model": document["model"], "adapter": document["adapter"], "data": document["data"]} | {
        "training": training,
        "resources": resources,
    }


class Range(NamedTuple):
    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """Of a run whose budget does not end it. Device-seconds have the price of `resources.capacity`, see `Bill`."""

    source: str
    steps: int
    step: float  # seconds
    seconds: Range  # from the start of the first stage to the end of the last one
    device_seconds: Range  # of training, as the budget counts it
    interruptions_per_day: float
    on_demand: float  # device-seconds without interruptions, at the price on demand
    without_checkpoints: float  # device-seconds expected of a script that starts over after each interruption
    interval: float  # seconds between checkpoints
    best_interval: float | None  # None without interruptions
    excess: float  # share of the time that the recipe's interval costs more than the best one
    affordable_steps: int | None  # where the budget ends the run before its last step
    fits: bool  # whether the budget pays for a step, the decay, and the reserve

    def to_json(self) -> Json:
        known: Json = {name: list(value) if isinstance(value, Range) else value for name, value in vars(self).items()}
        return {**known, "without_checkpoints": self.without_checkpoints if self.ends_without_checkpoints else None}

    @property
    def ends_without_checkpoints(self) -> bool:
        return self.without_checkpoints < MOST * self.device_seconds.expected


def forecast(recipe: Recipe, known: Measured, wait: float = MACHINE_S) -> Forecast:
    """Returns the forecast of a run.

    Interruptions come at `resources.interruptions_per_day`, else at the rate of the measured run. The time between two
    checkpoints is trained until it passes without one (Daly, 2006, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", equation 13). Ranges hold 90% of simulated runs, with a pace between the measured
    run's slowest and fastest, and all times up to `VARIES` longer or shorter. The best interval is Young's (1974),
    √(2 × save × time between interruptions).

    Args:
        recipe: The run's.
        known: Times of a run of the same kind.
        wait: Mean seconds until a machine after an interruption; they are exponentially distributed.
    """
    import numpy

    plan, devices, chunks = make_plan(recipe, known.plan.rows), recipe.devices, recipe.num_chunks
    given, budget = recipe.resources.interruptions_per_day, recipe.budget
    rate = (known.interruptions_per_day or 0.0 if given is None else given) / DAY
    each, per_epoch = recipe.evaluation.every, recipe.evaluation.per_epoch or 0
    evaluations = plan.num_steps // each if each else int(plan.passes(plan.num_steps) * per_epoch)
    step = known.step + evaluations * known.evaluation / plan.num_steps
    work = plan.num_steps * step
    saves = max(math.ceil(work / save_interval(recipe, plan, step)), chunks)
    interval, between = work / saves, work / saves + known.save
    fixed = known.first_start + (chunks - 1) * known.start + chunks * known.end + (saves - chunks) * known.save
    random = numpy.random.default_rng(0)
    pace = random.uniform(min(known.paces) / known.step, max(known.paces) / known.step, RUNS)
    varied = random.permutation(numpy.linspace(1 - VARIES, 1 + VARIES, RUNS))
    cut = random.negative_binomial(saves, math.exp(-min(rate * between, HOPELESS)), RUNS)
    mean, spread = _lost(between, rate)
    lost = random.normal(cut * mean, numpy.sqrt(cut) * spread).clip(0)  # the sum of that many
    process = varied * (work * pace + fixed + cut * known.start) + lost
    waits = varied * (known.before + (chunks - 1) * known.pause + known.after) + random.gamma(cut, wait)
    weight = budget.weight(recipe.resources.capacity) if budget else 1.0
    best = max(math.sqrt(2 * known.save / rate), step) if rate else None

    def overhead(every: float) -> float:
        return known.save / every + rate * every / 2

    whole = work + known.first_start
    alone = (1 / rate + known.start) * math.expm1(min(rate * whole, HOPELESS)) if rate else whole
    affordable, fits = None, True
    if budget:
        rooms = [
            budget.device_seconds / weight / devices if budget.device_seconds is not None else None,
            budget.run_seconds,
            budget.ends_at - time.time() - known.before if budget.ends_at is not None else None,
        ]
        room = min(room for room in rooms if room is not None) - reserve(recipe, plan, known.start, step)
        fits = room >= known.first_start + ((recipe.training.decay_steps or 0) + 1) * step
        steps = int(plan.num_steps * max(room, 0.0) / float(process.mean()))
        affordable = steps if steps < plan.num_steps else None
    return Forecast(
        source=known.source,
        steps=plan.num_steps,
        step=step,
        seconds=_range(process + waits, 1.0),
        device_seconds=_range(process, devices * weight),
        interruptions_per_day=rate * DAY,
        on_demand=(work + fixed) * devices,
        without_checkpoints=alone * devices * weight,
        interval=interval,
        best_interval=best,
        excess=overhead(interval) - overhead(best) if best else 0.0,
        affordable_steps=affordable,
        fits=fits,
    )


def _lost(length: float, rate: float) -> tuple[float, float]:
    """Returns mean and standard deviation of the time until an interruption that comes within a length of time."""
    if rate * length < TINY:  # about uniform
        return length / 2, length / math.sqrt(12)
    growth = math.expm1(min(rate * length, HOPELESS))
    mean = 1 / rate - length / growth
    variance = 1 / rate**2 - length**2 * (growth + 1) / growth**2
    return mean, math.sqrt(max(variance, 0.0))


def _range(seconds: Any, factor: float) -> Range:
    import numpy

    low, high = numpy.quantile(seconds, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Range(float(seconds.mean()) * factor, float(low) * factor, float(high) * factor)
