"""Trials of a sweep, drawn bracket by bracket, each with a run; the same data is split and tokenized once."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from baton import fork
from baton.documents import Json
from baton.errors import UserError
from baton.pages import quality_page
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import OwnCode, PinnedModels, RunInfo, SplitData
from baton.runs.outcomes import RungEntry, SweepHead, TrialEntry, TrialInfo
from baton.runs.plan import make_plan
from baton.runs.run import Run, check_name, identity, now, with_older_keys
from baton.runs.sweep import Sweep
from baton.runtime import SYSTEM
from baton.store import sources
from baton.store.storage import Storage
from baton.sweep import search, tracking
from baton.sweep.search import Bracket, Known, brackets
from baton.tracking import tracking_run

logger = logging.getLogger("baton")

CARRIED = (*fork.CARRIED, quality_page.QUALITY)
"""Results of split and tokenize, which hold for every trial on the same data."""
DECIDING = (SplitData.NAME, PinnedModels.NAME, OwnCode.NAME)
"""Parts of `baton.runs.run.state_identity`, which must not change."""


def preparation_name(sweep: Sweep, recipe: Recipe) -> str:
    """Returns the name of the run that splits and tokenizes a trial's data: the same for the same data."""
    return _name(sweep, recipe, recipe.model_dump(mode="json"))


def _preparation_names(sweep: Sweep, trials: list[tuple[TrialEntry, Recipe]]) -> list[str]:
    """Returns for each trial the run with its data; one that an older Baton made, under its keys, is used."""
    names = []
    for _, own in trials:
        document = own.model_dump(mode="json")
        document["data"] = with_older_keys(own, document["data"])
        names.append((_name(sweep, own, document), preparation_name(sweep, own)))
    is_made = {older: Run(sweep.storage, older).read(RunInfo) is not None for older in dict(names)}
    return [older if is_made[older] else name for older, name in names]


def _name(sweep: Sweep, recipe: Recipe, document: dict[str, Any]) -> str:
    del document["model"]["from_scratch"], document["data"]["workers"], document["data"]["shards"]
    if recipe.data.csv is None:  # older preparations, from before this setting, keep their names
        del document["data"]["csv"]
    decides = [recipe.seed, document["model"], document["data"], recipe.training.method, recipe.hooks.source]
    if recipe.training.second_model:  # its digest is found with the data
        decides.append(recipe.training.second_model[1].model_dump(mode="json"))
    digest = hashlib.sha256(json.dumps([*decides, recipe.needs_all_rows is None], sort_keys=True).encode()).hexdigest()
    return f"{sweep.name}-data-{digest[:8]}"


def _preparation_recipe(recipe: Recipe, own: Recipe) -> Recipe:
    """Returns a preparation's recipe, for a run that trains nothing and is not tracked."""
    length = {f"training.{name}": getattr(recipe.training, name) for name in ("learning_rate", "epochs", "max_steps")}
    return load.with_values(own, {**length, "tracking.mlflow": None})


def create_sweep(sweep: Sweep, recipe: Recipe, planned: list[Bracket]) -> None:
    """Writes the sweep with its first bracket's trials; one that exists must have the same recipe."""
    existing = sweep.find()
    if existing is None:
        assert recipe.sweep
        drawn = search.draw(recipe.sweep, recipe.seed, planned[0].trials)
        rungs = [
            RungEntry(rung=rung.number, bracket=rung.bracket, chunk=rung.chunk, keep=rung.keep)
            for bracket in planned
            for rung in bracket.rungs
        ]
        head = SweepHead(
            name=sweep.name,
            created=now(),
            recipe=recipe.model_dump(mode="json"),
            metric=recipe.sweep.metric,
            mode=recipe.sweep.mode,
            rungs=rungs,
            trials=[_trial(sweep, number, 1, values) for number, values in enumerate(drawn)],
        )
        if sweep.write_new(head):
            return
        existing = sweep.document()
    before = load.validate(existing.recipe, origin=sweep.uri)
    if changed := load.changed_paths(_identity(before), _identity(recipe)):
        raise UserError(
            f"sweep {sweep.name!r} was started with another recipe: {'; '.join(changed)}.",
            remedy="Choose another name, or set these back.",
        )


def add_trials(sweep: Sweep, recipe: Recipe, planned: list[Bracket], bracket: Bracket) -> None:
    """Draws a later bracket's trials from earlier scores, unless they are drawn."""
    assert recipe.sweep
    trials = sweep.document().trials
    first = sum(before.trials for before in planned[: bracket.number - 1])
    numbers = range(first, first + bracket.trials)
    if {f"t{number:03d}" for number in numbers} <= {trial.id for trial in trials}:
        return

    def know(trial: TrialEntry) -> Known:
        scores = {score.chunk: score.value for score in sweep.scores(trial.run) if score.value is not None}
        return Known(values=trial.values, scores=scores, finished=recipe.num_chunks in scores)

    known = SYSTEM.each(know, [trial for trial in trials if 1 <= trial.bracket < bracket.number])
    drawn = search.draw(recipe.sweep, recipe.seed, bracket.trials, known)
    for number, values in zip(numbers, drawn, strict=True):
        sweep.add(_trial(sweep, number, bracket.number, values))


def bracket_trials(sweep: Sweep, recipe: Recipe, bracket: int) -> list[tuple[TrialEntry, Recipe]]:
    return [
        (trial, search.configured(recipe, trial.values, f"trial {trial.id}"))
        for trial in sweep.document().trials
        if trial.bracket == bracket
    ]


def _identity(recipe: Recipe) -> Json:
    assert recipe.sweep
    return {**identity(recipe), "sweep": recipe.sweep.model_dump(mode="json", exclude={"parallel"})}


def _trial(sweep: Sweep, number: int, bracket: int, values: Json) -> TrialEntry:
    name = f"t{number:03d}"
    return TrialEntry(id=name, run=f"{sweep.name}-{name}", bracket=bracket, values=values, parent=None)


def start_bracket(recipe: Recipe, name: str, bracket: int) -> tuple[Sweep, list[dict[str, str]]]:
    """Draws a bracket's trials; returns the sweep, and `recipe`, `run` and `source` of each different data to make."""
    sweep = Sweep(Storage(recipe.store.uri), check_name(name))
    planned = brackets(recipe)
    if bracket == 1:
        create_sweep(sweep, recipe, planned)
    else:
        add_trials(sweep, recipe, planned, planned[bracket - 1])
    # By the recipe in the store, as `create_trials` names them: the given one may have another address of the rows.
    stored = load.validate(sweep.document().recipe, origin=sweep.uri)
    names = _preparation_names(sweep, bracket_trials(sweep, stored, bracket))
    preparations: dict[str, dict[str, str]] = {}
    trials = bracket_trials(sweep, recipe, bracket)
    assert recipe.sweep
    metric, parent = recipe.sweep.metric, tracking.parent(sweep, recipe)

    def note(trial: TrialEntry) -> None:
        about = TrialInfo(sweep=sweep.name, id=trial.id, values=trial.values, metric=metric, tracking=parent)
        sweep.run(trial).write(about)

    SYSTEM.each(note, [trial for trial, _ in trials])  # each is a trial before it is a run
    for run, (_, own) in zip(names, trials, strict=True):
        if run not in preparations:
            source = sources.as_parameter(own.model_dump(mode="json")["data"]["source"])
            preparations[run] = {"recipe": load.dumps(_preparation_recipe(recipe, own)), "run": run, "source": source}
    num_trials = planned[bracket - 1].trials
    logger.info("bracket %d has %d trials, on %d different data", bracket, num_trials, len(preparations))
    return sweep, list(preparations.values())


def create_trials(sweep: Sweep, bracket: int) -> list[str]:
    """Creates the runs of a bracket's trials with their prepared data, and returns the runs' addresses."""
    recipe = load.validate(sweep.document().recipe, origin=sweep.uri)
    trials = bracket_trials(sweep, recipe, bracket)
    names, prepared = _preparation_names(sweep, trials), {}
    for name in set(names):
        data = Run(sweep.storage, name)
        prepared[name] = data.need(RunInfo).made, data.plan().rows, {kind: data.raw(kind) for kind in CARRIED}

    def enter_one(named: tuple[str, tuple[TrialEntry, Recipe]]) -> Run:
        name, (trial, own) = named
        run, (made, rows, documents) = sweep.run(trial), prepared[name]
        run.create(own, made)
        for kind, document in documents.items():
            if document is not None:
                (run.set_once if kind in DECIDING else run.put)(kind, document)
        run.write_once(make_plan(own, rows))
        return run

    runs = SYSTEM.each(enter_one, zip(names, trials, strict=True))
    for run, (_, own) in zip(runs, trials, strict=True):
        tracking_run.start(run, own)
        tracking_run.log_data(run, own)
    return [run.uri for run in runs]
