"""What a person sees of a sweep: a line per score while it goes on, and a table of its trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from rich.table import Table

from components.shared.configurations import words
from components.shared.sweeps import Sweep, each
from pipelines.display import console

Event = dict[str, Any]


def heard(show: Callable[[Event], None]) -> Callable[[Event], None]:
    """Returns what hears the events of a sweep: the scores and rungs as lines, all else by `show`."""

    def hear(event: Event) -> None:
        if event["event"] == "scored":
            value = "not a number" if event["value"] is None else f"{event['value']:.6g}"
            console.print(f"{event['trial']} behind chunk {event['chunk']} (step {event['step']}): {value}")
        elif event["event"] == "rung":
            names = ", ".join(event["kept"])
            console.print(f"[bold]rung {event['rung']} of {event['of']}[/]: {names} go on, {event['stopped']} stopped")
        elif event["event"] == "trial_failed":
            console.print(f"[yellow]{event['trial']} chunk {event['chunk']} failed: {event['message']}[/]")
        else:
            show(event)

    return hear


def result(sweep: Sweep) -> dict[str, Any]:
    """Returns a sweep as plain values: a row for each trial, what it cost, and the winner once there is one."""
    document, rungs = sweep.document(), sweep.rungs()
    last = {rung["bracket"]: rung for rung in rungs}
    why = {entry["id"]: entry["why"] for rung in rungs for entry in rung["stopped"]}
    kept = {trial for rung in last.values() for trial in rung["kept"]}
    winner = sweep.get("winner.json")
    chunks = document["recipe"]["chunks"]["count"]

    def row(trial: dict[str, Any]) -> dict[str, Any]:
        scores, wish = sweep.scores(trial["run"]), sweep.control(trial["id"])
        newest = max(scores, key=lambda score: int(score["chunk"]), default=None)
        done = newest["chunk"] if newest else 0
        asked = wish["state"] if wish else None
        is_out = asked == "stop" or (trial["id"] in why and trial["id"] not in kept)
        state = "finished" if done == chunks else "stopped" if is_out else "goes on"
        return {
            **trial,
            "state": state,
            "asked": asked,
            "why": why.get(trial["id"]) if state == "stopped" else None,
            "chunks": done,
            "value": newest["value"] if newest else None,
            "seconds": sum(score["seconds"] for score in scores),
        }

    sign = -1 if document["mode"] == "max" else 1
    rows = each(row, document["trials"])
    rows.sort(key=lambda found: (-found["chunks"], found["value"] is None, sign * (found["value"] or 0.0)))
    return {
        "sweep": sweep.name,
        "sweep_uri": sweep.uri,
        "page_uri": f"{sweep.uri}/page.html",
        "metric": document["metric"],
        "chunks": chunks,
        "rungs": len(rungs),
        "of_rungs": len(document["rungs"]),
        "trials": rows,
        "winner": winner,
    }


def print_table(found: dict[str, Any]) -> None:
    """Prints a sweep for people."""
    table = Table(title=f"{found['sweep']}: rung {found['rungs']} of {found['of_rungs']}", title_justify="left")
    for name in ("trial", "values", "chunks", found["metric"], "seconds", "state"):
        table.add_column(name, overflow="fold")
    for row in found["trials"]:
        score = "—" if row["value"] is None else f"{row['value']:.6g}"
        state = f"{row['state']}: {row['why']}" if row["why"] else row["state"]
        done = f"{row['chunks']} of {found['chunks']}"
        values = words({_short(path): value for path, value in row["values"].items()})
        table.add_row(row["id"], values, done, score, f"{row['seconds']:.0f}", state)
    console.print(table)


def _short(path: str) -> str:
    """Returns the last part of a dotted path."""
    return path.rpartition(".")[2]


def print_winner(found: dict[str, Any]) -> None:
    """Prints where the best trial is."""
    best, run = found["winner"], found["winner_run"]
    values = next(row["values"] for row in found["trials"] if row["id"] == best["id"])
    typer.echo(f"winner: {best['id']} ({words(values)}), {found['metric']} {best['value']:.6g}")
    typer.echo(f"page:   {found['page_uri']}")
    typer.echo(f"report: {run['report_uri']}")
    if run["state"] == "rejected":
        typer.secho("The winner is rejected and nothing is exported.", fg=typer.colors.RED)
    else:
        typer.echo(f"model:  {run['model_uri']}")
