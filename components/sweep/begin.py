"""The beginning of a sweep's bracket: what is compared, once each content's tokens, and a run for every trial."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from baton.components.shared.core import events
from baton.components.shared.core.document import Json
from baton.components.shared.core.errors import UserError
from baton.components.shared.forks import forking
from baton.components.shared.pages import quality_checks
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs import tracking
from baton.components.shared.runs.documents.data import OwnCode, PinnedModels, SplitData
from baton.components.shared.runs.documents.sweeps import RungEntry, SweepHead, TrialEntry, TrialNote
from baton.components.shared.runs.plan import make_plan
from baton.components.shared.runs.run import Run, check_name, identity, now
from baton.components.shared.store import bundles, sources
from baton.components.shared.store.storage import Storage
from baton.components.shared.sweeps import configurations
from baton.components.shared.sweeps.configurations import Known
from baton.components.shared.sweeps.rungs import Bracket, brackets
from baton.components.shared.sweeps.sweep import Sweep
from baton.components.sweep import tracked

CARRIED = (*forking.CARRIED, quality_checks.QUALITY)
"""What split and tokenize have found for one run, and holds for every trial on the same data."""

DECIDING = (SplitData.NAME, PinnedModels.NAME, OwnCode.NAME)
"""Those of them by which a run's checkpoints know each other."""


def begin(recipe_json: str, name: str, store: str, bracket: int) -> tuple[Sweep, list[dict[str, str]]]:
    """Draws the trials of a bracket, and tells which data has to be made for them.

    Args:
        recipe_json: The recipe with its sweep, as `recipe_file.dumps` writes it.
        name: The sweep's name; one that exists goes on where it stopped.
        store: Folder or bucket.
        bracket: Number of the bracket, from 1.

    Returns:
        The sweep, and for each different data what split and tokenize are given: `recipe`, `run` and `source`.

    Raises:
        UserError: there is a sweep of this name with another recipe, or a trial's values make no recipe.
    """
    recipe = _in_store(recipe_file.loads(recipe_json), store)
    sweep = Sweep(Storage(recipe.store.uri), check_name(name))
    planned = brackets(recipe)
    if bracket == 1:
        _create(sweep, recipe, planned)
    else:
        _add(sweep, recipe, planned, planned[bracket - 1])
    preparations: dict[str, dict[str, str]] = {}
    trials = list(_trials(sweep, recipe, bracket))
    parent = tracked.parent(sweep, recipe)
    bundles.each(lambda trial: _make_trial(sweep, trial, recipe, parent), [trial for trial, _ in trials])
    for _, own in trials:
        run = preparation_name(sweep, own)
        if run not in preparations:
            source = sources.as_parameter(own.model_dump(mode="json")["data"]["source"])
            preparations[run] = {"recipe": recipe_file.dumps(_preparing(recipe, own)), "run": run, "source": source}
    events.emit("swept", bracket=bracket, trials=planned[bracket - 1].trials, data=len(preparations))
    return sweep, list(preparations.values())


def enter(sweep: Sweep, bracket: int) -> list[str]:
    """Gives each trial of a bracket a run with the data that was made for it.

    Returns:
        Addresses of the runs.
    """
    recipe = recipe_file.validate(sweep.document().recipe, origin=sweep.uri)
    trials = list(_trials(sweep, recipe, bracket))
    prepared = {name: _found_by(sweep, name) for name in {preparation_name(sweep, own) for _, own in trials}}

    def enter_one(trial_with_recipe: tuple[TrialEntry, Recipe]) -> Run:
        trial, own = trial_with_recipe
        run, (rows, documents) = sweep.run(trial), prepared[preparation_name(sweep, own)]
        run.create(own)
        for name, content in documents.items():
            (run.set_once if name in DECIDING else run.put)(name, content)
        run.write_once(make_plan(own, rows))
        return run

    runs = bundles.each(enter_one, trials)
    for run, (_, own) in zip(runs, trials, strict=True):
        tracking.start(run, own)
    return [run.uri for run in runs]


def _found_by(sweep: Sweep, name: str) -> tuple[int, dict[str, Any]]:
    """Returns the training sequences of prepared data, and what its stages have found, by name of the document."""
    run = Run(sweep.storage, name)
    documents = {document: run.get(document) for document in CARRIED}
    return run.plan().rows, {document: found for document, found in documents.items() if found is not None}


def preparation_name(sweep: Sweep, recipe: Recipe) -> str:
    """Returns the name of the run that a trial's data is split and tokenized in: the same for the same data."""
    document = recipe.model_dump(mode="json")
    del document["model"]["from_scratch"], document["data"]["workers"]
    decides = [recipe.seed, document["model"], document["data"], recipe.training.method, recipe.hooks.source]
    if recipe.training.second_model:  # its digest is found with the data
        decides.append(recipe.training.second_model[1].model_dump(mode="json"))
    digest = hashlib.sha256(json.dumps([*decides, recipe.needs_all_rows is None], sort_keys=True).encode()).hexdigest()
    return f"{sweep.name}-data-{digest[:8]}"


def _in_store(recipe: Recipe, store: str) -> Recipe:
    document = recipe.model_dump(mode="json")
    document["store"]["uri"] = store
    return recipe_file.validate(document, origin="pipeline parameters")


def _create(sweep: Sweep, recipe: Recipe, planned: list[Bracket]) -> None:
    """Writes the sweep with the trials of its first bracket, or makes sure that the one there is this one."""
    standing = sweep.find()
    if standing is None:
        assert recipe.sweep
        drawn = configurations.draw(recipe.sweep, recipe.seed, planned[0].trials)
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
        if sweep.create(head):
            return
        standing = sweep.document()
    before = recipe_file.validate(standing.recipe, origin=sweep.uri)
    if changed := recipe_file.changed_paths(_identity(before), _identity(recipe)):
        raise UserError(
            f"sweep {sweep.name!r} was started with another recipe: {'; '.join(changed)}.",
            remedy="Choose another name, or set these back.",
        )


def _identity(recipe: Recipe) -> dict[str, Any]:
    """Returns what two recipes of one sweep have in common."""
    assert recipe.sweep
    return {**identity(recipe), "sweep": recipe.sweep.model_dump(mode="json", exclude={"parallel"})}


def _add(sweep: Sweep, recipe: Recipe, planned: list[Bracket], bracket: Bracket) -> None:
    """Draws the trials of a later bracket by what those before have shown, unless they are drawn."""
    assert recipe.sweep
    there = {trial.id for trial in sweep.trials()}
    first = sum(before.trials for before in planned[: bracket.number - 1])
    numbers = range(first, first + bracket.trials)
    if all(_trial_id(number) in there for number in numbers):
        return
    before = [trial for trial in sweep.trials() if 1 <= trial.bracket < bracket.number]
    known = bundles.each(lambda trial: _known(sweep, trial, recipe), before)
    drawn = configurations.draw(recipe.sweep, recipe.seed, bracket.trials, known)
    for number, values in zip(numbers, drawn, strict=True):
        sweep.add(_trial(sweep, number, bracket.number, values))


def _known(sweep: Sweep, trial: TrialEntry, recipe: Recipe) -> Known:
    scores = {score.chunk: score.value for score in sweep.scores(trial.run) if score.value is not None}
    return Known(values=trial.values, scores=scores, finished=recipe.chunks.count in scores)


def _trial_id(number: int) -> str:
    return f"t{number:03d}"


def _trial(sweep: Sweep, number: int, bracket: int, values: Json) -> TrialEntry:
    name = _trial_id(number)
    return TrialEntry(id=name, run=f"{sweep.name}-{name}", bracket=bracket, values=values, parent=None)


def _trials(sweep: Sweep, recipe: Recipe, bracket: int) -> Iterator[tuple[TrialEntry, Recipe]]:
    """Yields the trials of a bracket, each with its recipe."""
    for trial in sweep.trials():
        if trial.bracket == bracket:
            yield trial, configurations.configured(recipe, trial.values, f"trial {trial.id}")


def _make_trial(sweep: Sweep, trial: TrialEntry, recipe: Recipe, parent: str | None) -> None:
    """Notes with a trial's run what it is, before it is a run."""
    assert recipe.sweep
    metric = recipe.sweep.metric
    note = TrialNote(sweep=sweep.name, id=trial.id, values=trial.values, metric=metric, tracking=parent)
    sweep.run(trial).write(note)


def _preparing(recipe: Recipe, own: Recipe) -> Recipe:
    """Returns the recipe by which a trial's data is made, in a run that trains nothing and is not tracked."""
    document = own.model_dump(mode="json")
    document["training"] |= {name: getattr(recipe.training, name) for name in ("learning_rate", "epochs", "max_steps")}
    document["tracking"]["mlflow"] = None
    return recipe_file.validate(document, origin=recipe.name)
