"""`baton sweep`: run a sweep on this machine, show it, and stop, resume or fork single trials."""

import functools
import operator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from baton import fork as forking
from baton.checkpoint import seals
from baton.checkpoint.store import CheckpointStore
from baton.cli import display, options
from baton.cli.display import Display, console
from baton.cli.local import begun_by
from baton.documents import Json
from baton.errors import UserError
from baton.local import engine, forkserver, results
from baton.recipe import load
from baton.runs import objects
from baton.runs.outcomes import SweepHead, TrialEntry, TrialInfo, TrialRequest, TrialState, Winner
from baton.runs.run import Sweep, check_name
from baton.runtime import SYSTEM
from baton.source import prepare
from baton.store.clouds import ANY_BUCKET
from baton.store.storage import Storage
from baton.sweep import view as sweep_view
from baton.sweep.search import check_trials, describe_values
from baton.tracking import tracking_run

app = typer.Typer(
    help="Compare many configurations; stop the worse ones early",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@dataclass(frozen=True)
class SweepAnswer:
    """Answer about a sweep: its trials, the requests for them, and the winner once there is one."""

    document: SweepHead
    view: sweep_view.View
    requests: dict[str, TrialRequest | None]
    winner: Winner | None

    def to_json(self) -> dict[str, object]:
        entries, view = {trial.id: trial for trial in self.document.trials}, self.view
        rows = [
            {
                **entries[trial.id].to_json(),
                "state": trial.state,
                "asked": request.state if (request := self.requests[trial.id]) else None,
                "why": None if trial.is_alive else trial.why,
                "chunks": trial.chunk,
                "value": trial.score,
                "seconds": trial.seconds,
            }
            for trial in view.trials
        ]
        return {
            "sweep": view.name,
            "sweep_uri": view.uri,
            "page_uri": f"{view.uri}/page.html",
            "metric": view.metric,
            "chunks": self.document.num_chunks,
            "rungs": len(view.rungs),
            "of_rungs": view.num_rungs,
            "trials": rows,
            "winner": self.winner and self.winner.to_json(),
        }


def gather(sweep: Sweep) -> SweepAnswer:
    """Reads the answer about a sweep."""
    document, view = sweep.document(), sweep_view.gather(sweep, with_losses=False)
    names = [trial.id for trial in document.trials]
    requests = dict(zip(names, SYSTEM.each(sweep.request, names), strict=True))
    return SweepAnswer(document, view, requests, sweep.read(Winner))


def print_table(shown: SweepAnswer) -> None:
    """Prints a sweep for people."""
    view = shown.view
    table = Table(title=f"{view.name}: rung {len(view.rungs)} of {view.num_rungs}", title_justify="left")
    for name in ("trial", "values", "chunks", view.metric, "seconds", "state"):
        table.add_column(name, overflow="fold")
    for trial in view.trials:
        score = "—" if trial.score is None else f"{trial.score:.6g}"
        state = sweep_view.STATES[trial.state] + (f": {trial.why}" if trial.why and not trial.is_alive else "")
        if (request := shown.requests[trial.id]) and request.state == "stop" and trial.state in ("training", "goes on"):
            state += "; asked to stop"
        done = f"{trial.chunk} of {shown.document.num_chunks}"
        values = describe_values({path.rpartition(".")[2]: value for path, value in trial.values.items()})
        table.add_row(trial.id, values, done, score, f"{trial.seconds:.0f}", state)
    display.print_table(table)


def print_winner(shown: SweepAnswer, run: results.Result) -> None:
    """Prints the best trial, whose run is over."""
    best, view = shown.winner, shown.view
    assert best is not None
    values = next(trial.values for trial in view.trials if trial.id == best.id)
    typer.echo(f"winner: {best.id} ({describe_values(values)}), {view.metric} {best.value:.6g}")
    typer.echo(f"page:   {view.uri}/page.html")
    typer.echo(f"report: {run['report_uri']}")
    if run["state"] == "rejected":
        typer.secho("winner rejected by the gate; nothing exported", fg=typer.colors.RED)
    else:
        typer.echo(f"model:  {run['model_uri']}")


Given = Annotated[
    str,
    typer.Argument(metavar="SWEEP", help="Name, or STORE/sweeps/NAME.", show_default=False),
]
Trial = Annotated[str, typer.Argument(metavar="TRIAL", help="Id of a trial, such as t003.", show_default=False)]
Why = Annotated[str, typer.Option(help="Reason, kept with the sweep.")]
WhereOption = Annotated[str, typer.Option("--store", help=f"Folder or bucket ({ANY_BUCKET}) to look up names in.")]
IN_WORDS: dict[TrialState, str] = {"stop": "stops", "go": "resumes"}


def open_sweep(address: str, store: str) -> Sweep:
    """Returns a sweep by its address, or by its name in a store."""
    sweep = Sweep.open(address) if "/" in address else Sweep(Storage(store), address)
    sweep.document()
    return sweep


@app.command()
def stop(
    sweep: Given,
    trial: Trial,
    why: Why = "asked by hand",
    store: WhereOption = options.DEFAULT_STORE,
    json: options.Json = False,
) -> None:
    """Stop a trial at its next chunk boundary; `baton sweep resume` continues it."""
    with options.answer(json):
        _ask(open_sweep(sweep, store), trial, "stop", why, json)


@app.command()
def resume(
    sweep: Given,
    trial: Trial,
    why: Why = "asked by hand",
    store: WhereOption = options.DEFAULT_STORE,
    json: options.Json = False,
) -> None:
    """Resume a stopped trial at the next rung, and train it to the end.

    The trial first catches up from its newest checkpoint. After the last rung, start the sweep again under its name.
    """
    with options.answer(json):
        _ask(open_sweep(sweep, store), trial, "go", why, json)


@app.command()
def fork(
    sweep: Given,
    trial: Trial,
    overrides: options.Overrides = None,
    step: Annotated[int | None, typer.Option(help="Step of a checkpoint. Default: the newest.")] = None,
    store: WhereOption = options.DEFAULT_STORE,
    json: options.Json = False,
) -> None:
    """Add a trial that starts at a checkpoint of another, with other values.

    Joins at the next rung, or the next chunk with `sweep.device: shared`, and trains to the end.
    """
    with options.answer(json):
        opened = open_sweep(sweep, store)
        if not overrides:
            raise UserError("a fork needs a changed value.", remedy="Change a value with --set.")
        parent = opened.trial(trial)
        forks = [int(other.id[1:]) for other in opened.document().trials if other.bracket == 0]
        trial_id = f"f{max(forks, default=-1) + 1:03d}"
        forked = forking.fork(opened.run(parent), step, f"{opened.name}-{trial_id}", overrides, warm=True)
        values, document = dict(parent.values), forked.recipe.model_dump(mode="json")
        for override in overrides:
            path = override.partition("=")[0].strip()
            values[path] = functools.reduce(operator.getitem, path.split("."), document)
        begins: Json = {"run": parent.run, "step": forked.step}
        made = TrialEntry(id=trial_id, run=forked.run.name, bracket=0, values=values, parent=begins)
        about = opened.run(parent).need(TrialInfo)
        key = CheckpointStore.of(forked.run, forked.recipe).signed_by
        with seals.stage(forked.run, objects.ADOPT, public=key):
            forked.run.write(about.model_copy(update={"id": trial_id, "values": values}))
        opened.add(made)
        if _shares(opened):  # it may train before a judge begins its tracking
            tracking_run.start(forked.run, forked.recipe)
        opened.ask(made.id, "go", f"forked from {trial}")
        if json:
            options.print_json({"sweep": opened.name, **made.to_json()})
        else:
            first = f"{made.id}: run {made.run} begins at step {forked.step}"
            typer.echo("\n".join([first, *forked.lines, f"It joins {_when(opened, _joins(opened))}."]))


def _ask(sweep: Sweep, trial: str, state: TrialState, why: str, json: bool) -> None:
    sweep.trial(trial)
    sweep.ask(trial, state, why)
    if json:
        options.print_json({"sweep": sweep.name, "trial": trial, "state": state, "why": why})
    else:
        at = "at its next chunk boundary" if state == "stop" else _joins(sweep)
        typer.echo(f"{trial}: {IN_WORDS[state]} {_when(sweep, at)}")


def _shares(sweep: Sweep) -> bool:
    settings = load.validate(sweep.document().recipe, origin=sweep.uri).sweep
    return settings is not None and settings.device == "shared"


def _joins(sweep: Sweep) -> str:
    return f"at the next {'chunk, or rung in a process of its own' if _shares(sweep) else 'rung'}"


def _when(sweep: Sweep, at: str) -> str:
    if len(sweep.rungs()) < len(sweep.document().rungs):
        return at
    return f"once the sweep, which is over, is started again: baton sweep run RECIPE --run {sweep.name}"


@app.command()
def run(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    store: options.Store = None,
    name: Annotated[str | None, typer.Option("--run", help="Name of the sweep; an existing one resumes.")] = None,
    chunks: options.ChunkCount = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Compare the configurations of a recipe on this machine, and export the best.

    --run NAME resumes an interrupted sweep, with the same winner and bits. Exit code 3 means a winner rejected by the
    gate.
    """
    with options.answer(json, trust):
        from baton.local import sweep as local  # which imports kfp

        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks).localised()
        engine.require_one_machine(loaded)
        trials = check_trials(loaded)
        sweep_name = check_name(name or prepare.new_run_name(loaded))
        storage = prepare.check_store(loaded)
        forkserver.start()
        prepare.check_model(loaded)
        more = [word for each in overrides or () for word in ("--set", each)]
        more += ["--store", store] if store else []
        words = ["sweep", "run", recipe, "--run", sweep_name, *more]
        options.resumable(words)
        console.print(f"sweep [bold]{sweep_name}[/] of {trials} trials at {escape(Sweep(storage, sweep_name).uri)}")
        with begun_by(words), Display(loaded.num_chunks) as display:
            best = local.LocalSweep(loaded, sweep_name, display.heard).run()
            local.export_best_trial(best, sweep_name, display.heard)
        shown, result = gather(Sweep(storage, sweep_name)), results.result(best)
        if json:
            options.print_json({**shown.to_json(), "winner_run": result})
        else:
            print_table(shown)
            print_winner(shown, result)
        if result["state"] == "rejected":
            raise typer.Exit(options.REJECTED)


@app.command()
def status(sweep: Given, store: WhereOption = options.DEFAULT_STORE, json: options.Json = False) -> None:
    """Show trials: progress, score and reason of a stop."""
    with options.answer(json):
        shown = gather(open_sweep(sweep, store))
        options.print_json(shown.to_json()) if json else print_table(shown)
