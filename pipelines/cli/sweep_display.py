"""What a person sees of a sweep: a line per score while it runs, and a table of its trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import typer
from rich.table import Table

from baton.components.shared.core import events
from baton.components.shared.core.events import Event
from baton.components.shared.runs.documents.sweeps import SweepHead, Winner, Wish
from baton.components.shared.store import bundles
from baton.components.shared.sweeps import view as sweep_view
from baton.components.shared.sweeps.configurations import words
from baton.components.shared.sweeps.sweep import Sweep
from baton.components.shared.sweeps.view import View
from baton.pipelines.cli.display import answer, console
from baton.pipelines.local.processes import TrialFailed
from baton.pipelines.local.results import Result


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
                console.print(
                    f"{event.trial} chunk {event.chunk} failed: {event.message}", style="yellow", markup=False
                )
            case _:
                show(event)

    return hear


@dataclass(frozen=True)
class Shown:
    """A sweep as a command answers: its trials, the wishes for them, and the winner once there is one."""

    document: SweepHead
    view: View
    wishes: dict[str, Wish | None]
    winner: Winner | None

    def to_json(self) -> dict[str, object]:
        """Returns plain values, a row for each trial."""
        entries, view = {trial.id: trial for trial in self.document.trials}, self.view
        rows = [
            {
                **entries[trial.id].to_json(),
                "state": trial.state,
                "asked": wish.state if (wish := self.wishes[trial.id]) else None,
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


def gather(sweep: Sweep) -> Shown:
    """Reads what is shown of a sweep."""
    document, view = sweep.document(), sweep_view.gather(sweep, with_losses=False)
    names = [trial.id for trial in document.trials]
    wishes = dict(zip(names, bundles.each(sweep.control, names), strict=True))
    return Shown(document, view, wishes, sweep.read(Winner))


def print_table(shown: Shown) -> None:
    """Prints a sweep for people."""
    view = shown.view
    table = Table(title=f"{view.name}: rung {len(view.rungs)} of {view.num_rungs}", title_justify="left")
    for name in ("trial", "values", "chunks", view.metric, "seconds", "state"):
        table.add_column(name, overflow="fold")
    for trial in view.trials:
        score = "—" if trial.score is None else f"{trial.score:.6g}"
        state = sweep_view.STATES[trial.state] + (f": {trial.why}" if trial.why and not trial.is_alive else "")
        wish = shown.wishes[trial.id]
        state += "; asked to stop" if wish and wish.state == "stop" and trial.state in ("training", "goes on") else ""
        done = f"{trial.chunk} of {shown.document.num_chunks}"
        values = words({path.rpartition(".")[2]: value for path, value in trial.values.items()})
        table.add_row(trial.id, values, done, score, f"{trial.seconds:.0f}", state)
    answer(table)


def print_winner(shown: Shown, run: Result) -> None:
    """Prints where the best trial is, whose run is over."""
    best, view = shown.winner, shown.view
    assert best is not None
    values = next(trial.values for trial in view.trials if trial.id == best.id)
    typer.echo(f"winner: {best.id} ({words(values)}), {view.metric} {best.value:.6g}")
    typer.echo(f"page:   {view.uri}/page.html")
    typer.echo(f"report: {run['report_uri']}")
    if run["state"] == "rejected":
        typer.secho("The winner is rejected and nothing is exported.", fg=typer.colors.RED)
    else:
        typer.echo(f"model:  {run['model_uri']}")
