"""Whether this Baton resumes the runs that a pipeline would join, as far as the store tells before it is run."""

from __future__ import annotations

import contextlib
import os

from baton.components.shared.checkpoints.store import CheckpointStore
from baton.components.shared.core.errors import DamagedError, StoreError
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run, check_name, chosen_name
from baton.components.shared.store.registry import environment_of
from baton.components.shared.store.storage import Storage
from baton.pipelines.compiling import prepare

PATIENCE_S = 3.0
"""Seconds for which a store that does not answer is asked: somebody waits."""


def check(recipe: Recipe, storage: Storage, name: str) -> None:
    """Checks that this Baton continues the runs of a name, of all phases, where they exist.

    Raises:
        FormatError: another release made one, and this one does not continue that.
    """
    for phase in [phase.name for phase in recipe.phases] or [""]:
        run = Run(storage, chosen_name(name, "", "", phase))
        if head := run.read(RunHead):
            run.require_continued(head)
            newest, plan = CheckpointStore(run).newest(), run.read(Plan)
            if newest and plan and newest.step < plan.num_steps and not newest.meta.finished:
                newest.require_continued()


def named(recipe: Recipe, name: str | None) -> str:
    """Returns the name of a run in pods, a new one where none is given, checked as far as the store can be asked.

    Raises:
        UserError: it is no name, or that of a run by another release, which this one does not continue.
    """
    if name is None:
        return prepare.new_run_name(recipe)
    check_name(name)
    variables = environment_of(recipe.store.uri)
    # Pods may have credentials where this machine has none, and reach a store that it does not.
    if not variables or any(variable.startswith(variables) for variable in os.environ):
        with contextlib.suppress(StoreError, DamagedError):
            check(recipe, Storage(recipe.store.uri, patience=PATIENCE_S), name)
    return name
