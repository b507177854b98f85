"""Time and price of a run before it starts: from an earlier run of the store, or a probe of some steps here."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from baton import api, events
from baton.cli.display import Display
from baton.errors import BatonError, StoreError, UserError
from baton.pages.html import duration
from baton.recipe.recipe import Recipe
from baton.runs.documents import RunInfo
from baton.runs.forecast import FAR, Forecast, Measured, forecast, is_alike, measured
from baton.runs.run import Run
from baton.source import prepare
from baton.source.prepare import LoadedRecipe
from baton.store.storage import Storage

logger = logging.getLogger("baton")

STEPS = 20  # of a probe, in two chunks
WARM = 2  # first steps of a chunk, which are slower
EVALUATED = 5  # step of a chunk after which a probe evaluates, if the recipe does
MOST_RUNS = 40  # of a store, to compare
SHORT: dict[str, object] = {  # what a probe changes
    "training.max_steps": STEPS,
    "training.epochs": None,
    "training.lr_scheduler": "constant",
    "training.lr_scheduler_options": {},
    "training.warmup_steps": 0,
    "training.early_stopping": None,
    "training.guard": None,
    "evaluation.per_epoch": None,
    "evaluation.sample_every": None,
    "evaluation.gate": {},
    "chunks.count": 2,
    "chunks.extra": 0,
    "chunks.checkpoint_every": None,
    "chunks.signing": None,
    "tracking.mlflow": None,
    "budget": None,
}


def by_probe(found: LoadedRecipe) -> Forecast:
    """Returns the forecast of a recipe of one training, after some of its steps here."""
    return forecast(found.localised(), probe(found))


def by_earlier(recipe: Recipe) -> Forecast | None:
    """Returns the forecast of a recipe of one training, None without an earlier run of its kind in the store."""
    storage = Storage(recipe.store.uri)
    try:
        names = storage.list("runs")
    except StoreError as error:  # of a store that only pods reach
        logger.info("no forecast: %s", error.message)
        return None
    runs: list[tuple[str, Run]] = []
    for name in sorted(names, key=lambda name: (name.startswith(f"{recipe.name}-"), name))[-MOST_RUNS:]:
        run = Run(storage, name)
        with contextlib.suppress(BatonError):  # a script's, of a later Baton, or damaged
            if is_alike(recipe, run.recipe()):
                runs.append((run.need(RunInfo).created, run))
    known = (measured(run, f"run {run.name} of this store") for _, run in sorted(runs, key=lambda each: each[0])[::-1])
    return next((forecast(recipe, each) for each in known if each), None)


def probe(found: LoadedRecipe) -> Measured:
    """Trains some steps of a recipe here, in a temporary store, and returns its times."""
    prepare.require_single(found.recipe, "--probe")
    times: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="baton-probe-") as folder, Display(0) as display:

        def heard(event: events.Event) -> None:
            if isinstance(event, events.Step):
                times[event.step] = time.monotonic()
            display.heard(event)

        evaluation = found.recipe.evaluation
        each = EVALUATED if evaluation.every or evaluation.per_epoch else None
        loaded = api.load(found, {**SHORT, "evaluation.every": each}, store=f"{folder}/store")
        api.run(loaded, "probe", on_event=heard)
        known = measured(Run(Storage(f"{folder}/store"), "probe"), f"{STEPS} steps here")
    assert known
    half, evaluations, paces = STEPS // 2, [], []
    for first in (0, half):  # step of a chunk's begin
        warm, evaluated, end = first + WARM, first + EVALUATED, first + half
        before, after = times[evaluated] - times[warm], times[end] - times[evaluated + 1]
        paces.append((before + after) / (half - WARM - 1))
        evaluations.append(times[evaluated + 1] - times[evaluated] - paces[-1])
    evaluated_for = max(fmean(evaluations), 0.0) if each else 0.0
    # The first steps' excess comes once a process; evaluations follow steps 5, 10, 15 and 20.
    slow = max((known.step - fmean(paces)) * half - 2 * evaluated_for, 0.0)
    first_start, start = known.first_start + slow, known.start + slow
    return replace(known, paces=tuple(paces), evaluation=evaluated_for, first_start=first_start, start=start)


def require_budget(recipe: Recipe, told: Forecast) -> None:
    """Refuses a budget that does not pay for the shortest run."""
    if told.fits or recipe.budget is None:
        return
    limit = recipe.budget.limit or f"by {recipe.budget.by}"
    raise UserError(
        f"budget: {limit} does not pay for a step, the decay of the learning rate, and evaluation and export "
        f"({told.source}).",
        remedy=f"The whole run takes about {duration(told.seconds.expected)}"
        f" and {recipe.budget.cost(told.device_seconds.expected)}; raise the budget, or shorten the decay.",
    )


def in_words(recipe: Recipe, told: Forecast) -> Iterator[str]:
    """Yields a forecast, a sentence each."""
    budget, spent = recipe.budget, told.device_seconds

    def cost(device_seconds: float) -> str:
        return budget.cost(device_seconds) if budget else f"{device_seconds / 3600:.3g} device-hours"

    whole, low, high = map(duration, told.seconds)
    steps = f"{told.steps:,} steps of {duration(told.step)}"
    yield f"forecast: {whole} (90%: {low} to {high}), {steps}; by {told.source}"
    yield f"training: {cost(spent.expected)} (90%: {cost(spent.low)} to {cost(spent.high)})"
    if told.interruptions_per_day:
        never = "does not end in practice"
        script = cost(told.without_checkpoints) if told.ends_without_checkpoints else never
        yield (
            f"with {told.interruptions_per_day:.3g} interruptions a day; not interrupted, on demand: "
            f"{cost(told.on_demand)}; interrupted, without checkpoints: {script}"
        )
        if told.best_interval and told.excess > FAR:
            ours, best = duration(told.interval), duration(told.best_interval)
            yield (
                f"warning: a checkpoint every {ours} costs {told.excess:.0%} more time than one every {best}; "
                "set chunks.checkpoint_every"
            )
    if told.affordable_steps is not None:
        yield f"the budget ends the run at about step {told.affordable_steps:,} of {told.steps:,}"
