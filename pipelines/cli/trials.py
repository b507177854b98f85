"""`baton sweep stop`, `resume` and `fork`: single trials of a sweep."""

from __future__ import annotations

import functools
import operator
from typing import Annotated

import typer

from baton.components.shared.core.document import Json
from baton.components.shared.core.errors import UserError
from baton.components.shared.forks import forking
from baton.components.shared.runs.documents.sweeps import State, TrialEntry, TrialNote
from baton.components.shared.store.storage import Storage
from baton.components.shared.sweeps.sweep import Sweep
from baton.pipelines.cli.options import DEFAULT_STORE, Output, OutputOption, Overrides, print_json, reported

Given = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP", help="STORE/sweeps/NAME, as `baton sweep run` prints it, or NAME.", show_default=False
    ),
]
Trial = Annotated[str, typer.Argument(metavar="TRIAL", help="Id of a trial, such as t003.", show_default=False)]
Why = Annotated[str, typer.Option(help="Reason, kept with the sweep.")]
WhereOption = Annotated[
    str, typer.Option("--store", help="Folder, s3://, gs:// or az:// bucket, where SWEEP is a name.")
]
WISHES: dict[State, str] = {"stop": "stops", "go": "resumes"}


def open_sweep(address: str, store: str) -> Sweep:
    """Returns a sweep by its address, or by its name in a store."""
    sweep = Sweep.open(address) if "/" in address else Sweep(Storage(store), address)
    sweep.document()
    return sweep


def stop(
    sweep: Given,
    trial: Trial,
    why: Why = "asked by hand",
    store: WhereOption = DEFAULT_STORE,
    output: OutputOption = Output.text,
) -> None:
    """Stops a trial at its next chunk boundary. Its newest checkpoint stays; `baton sweep resume` continues from it."""
    with reported(output):
        _ask(open_sweep(sweep, store), trial, "stop", why, output)


def resume(
    sweep: Given,
    trial: Trial,
    why: Why = "asked by hand",
    store: WhereOption = DEFAULT_STORE,
    output: OutputOption = Output.text,
) -> None:
    """Brings a stopped trial back: from the next rung on it trains to the end, whatever its scores.

    It catches up what it has missed from its newest checkpoint. Where no rung is to come, start the sweep again under
    its name.
    """
    with reported(output):
        _ask(open_sweep(sweep, store), trial, "go", why, output)


def fork(
    sweep: Given,
    trial: Trial,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="One of its checkpoints; the newest when left out.")] = None,
    store: WhereOption = DEFAULT_STORE,
    output: OutputOption = Output.text,
) -> None:
    """Adds a trial that begins with all of the state at a checkpoint of another one, with other values.

    It joins at the next rung and trains to the end.
    """
    with reported(output):
        opened = open_sweep(sweep, store)
        if not overrides:
            raise UserError("a fork with nothing changed is its parent.", remedy="Change a value with --set.")
        made, lines = _forked(opened, opened.trial(trial), step, overrides)
        opened.ask(made.id, "go", f"forked from {trial}")
        if output is Output.json:
            print_json({"sweep": opened.name, **made.to_json()})
        else:
            begins = f"{made.id}: run {made.run} begins at step {made.parent and made.parent['step']}"
            typer.echo("\n".join([begins, *lines, f"It joins {_when(opened, 'at the next rung')}."]))


def _forked(sweep: Sweep, parent: TrialEntry, step: int | None, overrides: list[str]) -> tuple[TrialEntry, list[str]]:
    """Makes a trial of another one's checkpoint; returns it, and what it changes in words."""
    trials = sweep.trials()
    forks = [int(trial.id[1:]) for trial in trials if trial.bracket == 0]
    trial_id = f"f{max(forks, default=-1) + 1:03d}"
    made = forking.fork(sweep.run(parent), step, f"{sweep.name}-{trial_id}", overrides, warm=True)
    values = dict(parent.values)
    document = made.recipe.model_dump(mode="json")
    for override in overrides:
        path = override.partition("=")[0].strip()
        values[path] = functools.reduce(operator.getitem, path.split("."), document)
    origin: Json = {"run": parent.run, "step": made.step}
    trial = TrialEntry(id=trial_id, run=made.run.name, bracket=0, values=values, parent=origin)
    about = sweep.run(parent).need(TrialNote)
    made.run.write(about.model_copy(update={"id": trial_id, "values": values}))
    sweep.add(trial)
    return trial, made.lines


def _ask(sweep: Sweep, trial: str, state: State, why: str, output: Output) -> None:
    sweep.trial(trial)
    sweep.ask(trial, state, why)
    if output is Output.json:
        print_json({"sweep": sweep.name, "trial": trial, "state": state, "why": why})
    else:
        at = "at its next chunk boundary" if state == "stop" else "at the next rung"
        typer.echo(f"{trial}: {WISHES[state]} {_when(sweep, at)}")


def _when(sweep: Sweep, at: str) -> str:
    """Returns when a wish is taken up, in words."""
    if len(sweep.rungs()) < len(sweep.document().rungs):
        return at
    return f"once the sweep, which is over, is started again: baton sweep run RECIPE --run {sweep.name}"
