"""Requests to a sweep that trains: stop, resume and fork its trials, as `baton sweep` and the live page give them."""

import functools
import operator
from collections.abc import Sequence

from baton import fork as forking
from baton.checkpoint import seals
from baton.checkpoint.store import CheckpointStore
from baton.documents import Json
from baton.errors import UserError
from baton.runs import objects
from baton.runs.outcomes import TrialEntry, TrialInfo, TrialState
from baton.runs.run import Sweep
from baton.tracking import tracking_run

IN_WORDS: dict[TrialState, str] = {"stop": "stops", "go": "resumes"}
BY_HAND = "asked by hand"  # reason where none is given


def ask(sweep: Sweep, trial: str, state: TrialState, why: str = BY_HAND) -> str:
    """Asks to stop a trial or to train it to the end, and returns when that takes effect, in words."""
    sweep.trial(trial)
    sweep.ask(trial, state, why)
    at = "at its next chunk boundary" if state == "stop" else joins(sweep)
    return f"{trial}: {IN_WORDS[state]} {when(sweep, at)}"


def fork(sweep: Sweep, trial: str, step: int | None, overrides: Sequence[str]) -> tuple[TrialEntry, forking.Fork]:
    """Adds a trial that starts at a checkpoint of another with other values; `overrides` are `PATH=VALUE`."""
    if not overrides:
        raise UserError("a fork needs a changed value.", remedy="Change a value with --set.")
    parent = sweep.trial(trial)
    forks = [int(other.id[1:]) for other in sweep.document().trials if other.bracket == 0]
    trial_id = f"f{max(forks, default=-1) + 1:03d}"
    forked = forking.fork(sweep.run(parent), step, f"{sweep.name}-{trial_id}", overrides, warm=True)
    values, document = dict(parent.values), forked.recipe.model_dump(mode="json")
    for override in overrides:
        path = override.partition("=")[0].strip()
        values[path] = functools.reduce(operator.getitem, path.split("."), document)
    begins: Json = {"run": parent.run, "step": forked.step}
    made = TrialEntry(id=trial_id, run=forked.run.name, bracket=0, values=values, parent=begins)
    about = sweep.run(parent).need(TrialInfo)
    key = CheckpointStore.of(forked.run, forked.recipe).signed_by
    with seals.stage(forked.run, objects.ADOPT, public=key):
        forked.run.write(about.model_copy(update={"id": trial_id, "values": values}))
    sweep.add(made)
    if _shares(sweep):  # it may train before a judge begins its tracking
        tracking_run.start(forked.run, forked.recipe)
    sweep.ask(made.id, "go", f"forked from {trial}")
    return made, forked


def _shares(sweep: Sweep) -> bool:
    settings = sweep.document().recipe.get("sweep")
    return isinstance(settings, dict) and settings.get("device") == "shared"


def joins(sweep: Sweep) -> str:
    """Returns the point at which a resumed or new trial joins, in words."""
    return f"at the next {'chunk, or rung in a process of its own' if _shares(sweep) else 'rung'}"


def when(sweep: Sweep, at: str) -> str:
    """Returns when a request takes effect: `at`, or once a sweep that is over is started again."""
    if len(sweep.rungs()) < len(sweep.document().rungs):
        return at
    return f"once the sweep, which is over, is started again: baton sweep run RECIPE --run {sweep.name}"
