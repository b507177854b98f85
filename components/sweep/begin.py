"""The beginning of a sweep's bracket: what is compared, once each content's tokens, and a run for every trial."""

from __future__ import annotations

import logging

from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs import tracking
from baton.components.shared.runs.documents.sweeps import TrialEntry
from baton.components.shared.runs.plan import make_plan
from baton.components.shared.runs.run import Run, check_name
from baton.components.shared.store import bundles, sources
from baton.components.shared.store.storage import Storage
from baton.components.shared.sweeps.rungs import brackets
from baton.components.shared.sweeps.sweep import Sweep
from baton.components.sweep import drawing, tracked, trial_data

logger = logging.getLogger("baton")


def begin(recipe: Recipe, name: str, bracket: int) -> tuple[Sweep, list[dict[str, str]]]:
    """Draws the trials of a bracket, and tells which data has to be made for them.

    Args:
        recipe: The recipe with its sweep.
        name: The sweep's name; one that exists resumes.
        bracket: Number of the bracket, from 1.

    Returns:
        The sweep, and for each different data what split and tokenize are given: `recipe`, `run` and `source`.

    Raises:
        UserError: there is a sweep of this name with another recipe, or a trial's values make no recipe.
    """
    sweep = Sweep(Storage(recipe.store.uri), check_name(name))
    planned = brackets(recipe)
    if bracket == 1:
        drawing.create(sweep, recipe, planned)
    else:
        drawing.add(sweep, recipe, planned, planned[bracket - 1])
    preparations: dict[str, dict[str, str]] = {}
    trials = list(drawing.trials(sweep, recipe, bracket))
    parent = tracked.parent(sweep, recipe)
    bundles.each(lambda trial: drawing.note(sweep, trial, recipe, parent), [trial for trial, _ in trials])
    for _, own in trials:
        run = trial_data.preparation_name(sweep, own)
        if run not in preparations:
            source = sources.as_parameter(own.model_dump(mode="json")["data"]["source"])
            preparations[run] = {
                "recipe": recipe_file.dumps(trial_data.preparing(recipe, own)),
                "run": run,
                "source": source,
            }
    num_trials = planned[bracket - 1].trials
    logger.info("bracket %d has %d trials, on %d different data", bracket, num_trials, len(preparations))
    return sweep, list(preparations.values())


def enter(sweep: Sweep, bracket: int) -> list[str]:
    """Gives each trial of a bracket a run with the data that was made for it.

    Returns:
        Addresses of the runs.
    """
    recipe = recipe_file.validate(sweep.document().recipe, origin=sweep.uri)
    trials = list(drawing.trials(sweep, recipe, bracket))
    names = {trial_data.preparation_name(sweep, own) for _, own in trials}
    prepared = {name: trial_data.prepared(sweep, name) for name in names}

    def enter_one(trial_with_recipe: tuple[TrialEntry, Recipe]) -> Run:
        trial, own = trial_with_recipe
        run, data = sweep.run(trial), prepared[trial_data.preparation_name(sweep, own)]
        run.create(own, data.made)
        for name, content in data.documents.items():
            (run.set_once if name in trial_data.DECIDING else run.put)(name, content)
        run.write_once(make_plan(own, data.rows))
        return run

    runs = bundles.each(enter_one, trials)
    for run, (_, own) in zip(runs, trials, strict=True):
        tracking.start(run, own)
        tracking.log_data(run, own)
    return [run.uri for run in runs]
