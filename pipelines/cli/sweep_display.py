"""What a person sees of a sweep: a line per score while it runs, and a table of its trials."""

from __future__ import annotations

from collections.abc import Callable

import typer
from rich.table import Table

from baton.components.shared.core import events
from baton.components.shared.core.events import Event
from baton.components.shared.runs.documents.sweeps import Winner
from baton.components.shared.store import bundles
from baton.components.shared.sweeps import view as sweep_view
from baton.components.shared.sweeps.configurations import words
from baton.components.shared.sweeps.sweep import Sweep
from baton.pipelines.cli.display import console
from baton.pipelines.local.processes import TrialFailed
from baton.pipelines.local.results import Row


def heard(show: Callable[[Event], None]) -> Callable[[Event], None]:
    """Returns what hears the events of a sweep: the scores and rungs as lines, all else by `show`."""

    def hear(event: Event) -> None:
        match event:
            case events.Scored():
                value = "not a number" if event.value is None else f"{event.value:.6g}"
                console.print(f"{event.trial} after chunk {event.chunk} (step {event.step}): {value}")
            case events.Rung():
                names = ", ".join(event.kept)
                console.print(f"[bold]rung {event.rung} of {event.of}[/]: {names} stay, {event.stopped} stopped")
            case TrialFailed():
                console.print(f"[yellow]{event.trial} chunk {event.chunk} failed: {event.message}[/]")
            case _:
                show(event)

    return hear


def result(sweep: Sweep) -> Row:
    """Returns a sweep as plain values: a row for each trial, what it cost, and the winner once there is one."""
    document, view = sweep.document(), sweep_view.gather(sweep, with_losses=False)
    winner = sweep.read(Winner)
    trials = {trial.id: trial for trial in document.trials}
    wishes = dict(zip(trials, bundles.each(sweep.control, trials), strict=True))

    def row(trial: sweep_view.Trial) -> Row:
        wish = wishes[trial.id]
        return {
            **trials[trial.id].to_json(),
            "state": trial.state,
            "asked": wish.state if wish else None,
            "why": None if trial.is_alive else trial.why,
            "chunks": trial.chunk,
            "value": trial.score,
            "seconds": trial.seconds,
        }

    return {
        "sweep": view.name,
        "sweep_uri": view.uri,
        "page_uri": f"{view.uri}/page.html",
        "metric": view.metric,
        "chunks": document.num_chunks,
        "rungs": len(view.rungs),
        "of_rungs": view.num_rungs,
        "trials": [row(trial) for trial in view.trials],
        "winner": winner and winner.to_json(),
    }


def print_table(result: Row) -> None:
    """Prints a sweep for people."""
    table = Table(title=f"{result['sweep']}: rung {result['rungs']} of {result['of_rungs']}", title_justify="left")
    for name in ("trial", "values", "chunks", result["metric"], "seconds", "state"):
        table.add_column(name, overflow="fold")
    for row in result["trials"]:
        score = "—" if row["value"] is None else f"{row['value']:.6g}"
        state = sweep_view.STATES[row["state"]] + (f": {row['why']}" if row["why"] else "")
        state += "; asked to stop" if row["asked"] == "stop" and row["state"] in ("training", "goes on") else ""
        done = f"{row['chunks']} of {result['chunks']}"
        values = words({path.rpartition(".")[2]: value for path, value in row["values"].items()})
        table.add_row(row["id"], values, done, score, f"{row['seconds']:.0f}", state)
    console.print(table)


def print_winner(result: Row) -> None:
    """Prints where the best trial is."""
    best, run = result["winner"], result["winner_run"]
    values = next(row["values"] for row in result["trials"] if row["id"] == best["id"])
    typer.echo(f"winner: {best['id']} ({words(values)}), {result['metric']} {best['value']:.6g}")
    typer.echo(f"page:   {result['page_uri']}")
    typer.echo(f"report: {run['report_uri']}")
    if run["state"] == "rejected":
        typer.secho("The winner is rejected and nothing is exported.", fg=typer.colors.RED)
    else:
        typer.echo(f"model:  {run['model_uri']}")
