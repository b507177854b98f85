"""`baton sweep`: run a sweep on this machine, show it, and stop, resume or fork single trials."""

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from baton.cli import display, options
from baton.cli.display import Display, console
from baton.cli.local import begun_by
from baton.cli.watch import Port, serve
from baton.local import engine, forkserver, results
from baton.runs.outcomes import SweepHead, TrialState, Winner
from baton.runs.run import Sweep, check_name
from baton.source import prepare
from baton.store.clouds import ANY_BUCKET
from baton.store.storage import Storage
from baton.sweep import steer
from baton.sweep import view as sweep_view
from baton.sweep.search import check_trials, describe_values

app = typer.Typer(
    help="Compare many configurations; stop the worse ones early",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@dataclass(frozen=True)
class SweepAnswer:
    """Answer about a sweep: its trials, and the winner once there is one."""

    document: SweepHead
    view: sweep_view.View
    winner: Winner | None

    def to_json(self) -> dict[str, object]:
        entries, view = {trial.id: trial for trial in self.document.trials}, self.view
        rows = [
            {
                **entries[trial.id].to_json(),
                "state": trial.state,
                "asked": trial.asked,
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
    return SweepAnswer(sweep.document(), sweep_view.gather(sweep, with_losses=False), sweep.read(Winner))


def print_table(shown: SweepAnswer) -> None:
    """Prints a sweep for people."""
    view = shown.view
    table = Table(title=f"{view.name}: rung {len(view.rungs)} of {view.num_rungs}", title_justify="left")
    for name in ("trial", "values", "chunks", view.metric, "seconds", "state"):
        table.add_column(name, overflow="fold")
    for trial in view.trials:
        score = "—" if trial.score is None else f"{trial.score:.6g}"
        state = sweep_view.STATES[trial.state] + (f": {trial.why}" if trial.why and not trial.is_alive else "")
        if trial.asked == "stop" and trial.state in ("training", "goes on"):
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


def open_sweep(address: str, store: str) -> Sweep:
    """Returns a sweep by its address, or by its name in a store."""
    sweep = Sweep.open(address) if "/" in address else Sweep(Storage(store), address)
    sweep.document()
    return sweep


@app.command()
def stop(
    sweep: Given,
    trial: Trial,
    why: Why = steer.BY_HAND,
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
    why: Why = steer.BY_HAND,
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
        made, forked = steer.fork(opened, trial, step, overrides or ())
        if json:
            options.print_json({"sweep": opened.name, **made.to_json()})
        else:
            first = f"{made.id}: run {made.run} begins at step {forked.step}"
            typer.echo("\n".join([first, *forked.lines, f"It joins {steer.when(opened, steer.joins(opened))}."]))


def _ask(sweep: Sweep, trial: str, state: TrialState, why: str, json: bool) -> None:
    told = steer.ask(sweep, trial, state, why)
    if json:
        options.print_json({"sweep": sweep.name, "trial": trial, "state": state, "why": why})
    else:
        typer.echo(told)


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
            best = local.run_sweep(loaded, sweep_name, display.heard)
        shown, result = gather(Sweep(storage, sweep_name)), results.result(best)
        if json:
            options.print_json({**shown.to_json(), "winner_run": result})
        else:
            print_table(shown)
            print_winner(shown, result)
        if result["state"] == "rejected":
            raise typer.Exit(options.REJECTED)


@app.command()
def watch(sweep: Given, store: WhereOption = options.DEFAULT_STORE, port: Port = 0, json: options.Json = False) -> None:
    """Serve a page of a sweep that grows while it trains, with buttons.

    Shows curves, rungs and reasons of stops, from a folder or bucket. Stops, resumes, promotes and clones trials. Open
    the printed address; Ctrl-C ends the server, not the sweep.
    """
    with options.answer(json):
        serve(open_sweep(sweep, store), port, json)


@app.command()
def status(sweep: Given, store: WhereOption = options.DEFAULT_STORE, json: options.Json = False) -> None:
    """Show trials: progress, score and reason of a stop."""
    with options.answer(json):
        shown = gather(open_sweep(sweep, store))
        options.print_json(shown.to_json()) if json else print_table(shown)
