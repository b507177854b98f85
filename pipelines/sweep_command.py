"""`baton sweep`: many configurations of a recipe, compared while they train; here, or on Kubeflow Pipelines."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from components.shared import forking
from components.shared.core.document import Json
from components.shared.errors import UserError
from components.shared.recipe import Store
from components.shared.run_documents.sweeps import State, TrialEntry, TrialNote
from components.shared.rungs import check_trials
from components.shared.runs import check_name
from components.shared.storage import Storage
from components.shared.sweeps import Sweep
from pipelines import prepare, results, run_commands, sweep_display
from pipelines.display import Display, console
from pipelines.options import (
    REJECTED,
    ChunkCount,
    Endpoint,
    Image,
    Namespace,
    Output,
    OutputOption,
    Overrides,
    RecipePath,
    print_json,
    reported,
)
from pipelines.options import Store as StoreOption
from pipelines.package import Pipeline

app = typer.Typer(
    help="Compare many configurations of a recipe while they train: the worse ones stop early.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

SweepName = Annotated[
    str | None, typer.Option("--run", help="Name of the sweep; one that exists goes on where it stopped.")
]
Given = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP", help="STORE/sweeps/NAME, as `baton sweep run` prints it, or NAME.", show_default=False
    ),
]
Trial = Annotated[str, typer.Argument(metavar="TRIAL", help="Id of a trial, such as t003.", show_default=False)]
Why = Annotated[str, typer.Option(help="Reason, kept with the sweep.")]
WhereOption = Annotated[str, typer.Option("--store", help="Folder or s3://bucket[/prefix], where SWEEP is a name.")]
WISHES: dict[State, str] = {"stop": "stops", "go": "goes on"}
DEFAULT_STORE: str = Store.model_fields["uri"].default


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    store: StoreOption = None,
    name: SweepName = None,
    chunks: ChunkCount = None,
    output: OutputOption = Output.text,
) -> None:
    """Compare the configurations of a recipe on this machine, chunk by chunk in turns, and hand out the best.

    A sweep that was interrupted goes on where it stopped when it is given its name again with --run, and ends on the
    same winner with the same bits. The exit code is 3 where the recipe's gate rejects the winner.
    """
    with reported(output):
        from pipelines import local, warm
        from pipelines.sweep_local import LocalSweep

        loaded = prepare.localise(prepare.load(recipe, overrides or (), store=store, chunks=chunks), recipe)
        local.require_one_machine(loaded)
        trials = check_trials(loaded)
        given = check_name(name or prepare.new_run_name(loaded))
        storage = prepare.check_store(loaded)
        warm.start()
        prepare.check_model(loaded)
        console.print(f"sweep [bold]{given}[/] of {trials} trials at {Sweep(storage, given).uri}")
        with Display(loaded.chunks.count) as display:
            best = LocalSweep(loaded, given, sweep_display.heard(display.heard)).run()
        found = sweep_display.result(Sweep(storage, given)) | {"winner_run": results.result(best)}
        if output is Output.json:
            print_json(found)
        else:
            sweep_display.print_table(found)
            sweep_display.print_winner(found)
        if found["winner_run"]["state"] == "rejected":
            raise typer.Exit(REJECTED)


@app.command()
def submit(
    recipe: RecipePath,
    endpoint: Endpoint,
    experiment: Annotated[str | None, typer.Option(help="Experiment; the recipe's name when left out.")] = None,
    wait: run_commands.Wait = False,
    timeout: run_commands.Timeout = run_commands.WEEK_H,
    namespace: Namespace = None,
    service_account: Annotated[str | None, typer.Option(help="Service account of the pods.")] = None,
    overrides: Overrides = None,
    store: StoreOption = None,
    name: SweepName = None,
    chunks: ChunkCount = None,
    image: Image = None,
    output: OutputOption = Output.text,
) -> None:
    """Upload a recipe's sweep to Kubeflow, start it and print its page.

    `baton status`, `cancel` and `retry` act on it as on any run, `baton sweep stop` and `resume` on its trials.
    """
    run_commands.submit(
        recipe,
        endpoint,
        experiment=experiment,
        wait=wait,
        timeout=timeout,
        namespace=namespace,
        service_account=service_account,
        overrides=overrides,
        store=store,
        run_name=name,
        chunks=chunks,
        image=image,
        pipeline=Pipeline.sweep,
        output=output,
    )


@app.command()
def status(sweep: Given, store: WhereOption = DEFAULT_STORE, output: OutputOption = Output.text) -> None:
    """Show a sweep: how far each trial is, how well it does, and why one was stopped."""
    with reported(output):
        found = sweep_display.result(_open(sweep, store))
        print_json(found) if output is Output.json else sweep_display.print_table(found)


@app.command()
def stop(
    sweep: Given,
    trial: Trial,
    why: Why = "asked by hand",
    store: WhereOption = DEFAULT_STORE,
    output: OutputOption = Output.text,
) -> None:
    """Stop a trial at its next chunk boundary. Its newest checkpoint stays; `baton sweep resume` goes on from it."""
    with reported(output):
        _ask(_open(sweep, store), trial, "stop", why, output)


@app.command()
def resume(
    sweep: Given,
    trial: Trial,
    why: Why = "asked by hand",
    store: WhereOption = DEFAULT_STORE,
    output: OutputOption = Output.text,
) -> None:
    """Bring a stopped trial back: from the next rung on it trains to the end, whatever its scores.

    It catches up what it has missed from its newest checkpoint. Where no rung is to come, start the sweep again under
    its name.
    """
    with reported(output):
        _ask(_open(sweep, store), trial, "go", why, output)


@app.command()
def fork(
    sweep: Given,
    trial: Trial,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="One of its checkpoints; the newest when left out.")] = None,
    store: WhereOption = DEFAULT_STORE,
    output: OutputOption = Output.text,
) -> None:
    """Add a trial that begins with all of the state at a checkpoint of another one, with other values.

    It joins at the next rung and trains to the end.
    """
    with reported(output):
        opened = _open(sweep, store)
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
        values[path] = _at(document, path)
    origin: Json = {"run": parent.run, "step": made.step}
    trial = TrialEntry(id=trial_id, run=made.run.name, bracket=0, values=values, parent=origin)
    about = sweep.run(parent).need(TrialNote)
    made.run.write(about.model_copy(update={"id": trial_id, "values": values}))
    sweep.add(trial)
    return trial, made.lines


def _at(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[key]
    return document


def _open(given: str, store: str) -> Sweep:
    sweep = Sweep.open(given) if "/" in given else Sweep(Storage(store), given)
    sweep.document()
    return sweep


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
