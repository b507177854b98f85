"""The trials of a sweep: drawn bracket by bracket, each noted with the sweep and with its run."""

from __future__ import annotations

from collections.abc import Iterator

from baton.components.shared.core.document import Json
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.sweeps import RungEntry, SweepHead, TrialEntry, TrialNote
from baton.components.shared.runs.run import identity, now
from baton.components.shared.store import bundles
from baton.components.shared.sweeps import configurations
from baton.components.shared.sweeps.configurations import Known
from baton.components.shared.sweeps.rungs import Bracket
from baton.components.shared.sweeps.sweep import Sweep


def create(sweep: Sweep, recipe: Recipe, planned: list[Bracket]) -> None:
    """Writes the sweep with the trials of its first bracket, or makes sure that the one there is this one."""
    existing = sweep.find()
    if existing is None:
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
        existing = sweep.document()
    before = recipe_file.validate(existing.recipe, origin=sweep.uri)
    if changed := recipe_file.changed_paths(_identity(before), _identity(recipe)):
        raise UserError(
            f"sweep {sweep.name!r} was started with another recipe: {'; '.join(changed)}.",
            remedy="Choose another name, or set these back.",
        )


def add(sweep: Sweep, recipe: Recipe, planned: list[Bracket], bracket: Bracket) -> None:
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


def trials(sweep: Sweep, recipe: Recipe, bracket: int) -> Iterator[tuple[TrialEntry, Recipe]]:
    """Yields the trials of a bracket, each with its recipe."""
    for trial in sweep.trials():
        if trial.bracket == bracket:
            yield trial, configurations.configured(recipe, trial.values, f"trial {trial.id}")


def note(sweep: Sweep, trial: TrialEntry, recipe: Recipe, parent: str | None) -> None:
    """Notes with a trial's run what it is, before it is a run."""
    assert recipe.sweep
    metric = recipe.sweep.metric
    about = TrialNote(sweep=sweep.name, id=trial.id, values=trial.values, metric=metric, tracking=parent)
    sweep.run(trial).write(about)


def _identity(recipe: Recipe) -> Json:
    """Returns what two recipes of one sweep have in common."""
    assert recipe.sweep
    return {**identity(recipe), "sweep": recipe.sweep.model_dump(mode="json", exclude={"parallel"})}


def _known(sweep: Sweep, trial: TrialEntry, recipe: Recipe) -> Known:
    scores = {score.chunk: score.value for score in sweep.scores(trial.run) if score.value is not None}
    return Known(values=trial.values, scores=scores, finished=recipe.num_chunks in scores)


def _trial_id(number: int) -> str:
    return f"t{number:03d}"


def _trial(sweep: Sweep, number: int, bracket: int, values: Json) -> TrialEntry:
    name = _trial_id(number)
    return TrialEntry(id=name, run=f"{sweep.name}-{name}", bracket=bracket, values=values, parent=None)
