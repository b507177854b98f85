"""`baton sweep`: many configurations of a recipe, compared while they train."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from baton.components.shared.runs.run import check_name
from baton.components.shared.sweeps.rungs import check_trials
from baton.components.shared.sweeps.sweep import Sweep
from baton.pipelines.cli import options, sweep_display, trials
from baton.pipelines.cli.display import Display, console
from baton.pipelines.cli.options import REJECTED, Output, OutputOption, print_json, reported
from baton.pipelines.compiling import prepare
from baton.pipelines.local import results

app = typer.Typer(
    cls=options.Commands,
    help="Compare many configurations of a recipe while they train: the worse ones stop early.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

SweepName = Annotated[
    str | None, typer.Option("--run", help="Name of the sweep; one that exists resumes where it stopped.")
]


@app.command()
def run(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    store: options.Store = None,
    name: SweepName = None,
    chunks: options.ChunkCount = None,
    output: OutputOption = Output.text,
) -> None:
    """Compares the configurations of a recipe on this machine, chunk by chunk in turns, and hands out the best.

    A sweep that was interrupted resumes where it stopped when it is given its name again with --run, and ends on the
    same winner with the same bits. The exit code is 3 where the recipe's gate rejects the winner.
    """
    with reported(output):
        from baton.pipelines.local import engine, warm, winner
        from baton.pipelines.local.sweep import LocalSweep

        loaded = prepare.load_here(recipe, overrides, store=store, chunks=chunks)
        engine.require_one_machine(loaded)
        trials = check_trials(loaded)
        sweep_name = check_name(name or prepare.new_run_name(loaded))
        storage = prepare.check_store(loaded)
        warm.start()
        prepare.check_model(loaded)
        console.print(f"sweep [bold]{sweep_name}[/] of {trials} trials at {escape(Sweep(storage, sweep_name).uri)}")
        with Display(loaded.num_chunks) as display:
            heard = sweep_display.heard(display.heard)
            best = LocalSweep(loaded, sweep_name, heard).run()
            winner.hand_out(best, sweep_name, heard)
        shown, result = sweep_display.gather(Sweep(storage, sweep_name)), results.result(best)
        if output is Output.json:
            print_json({**shown.to_json(), "winner_run": result})
        else:
            sweep_display.print_table(shown)
            sweep_display.print_winner(shown, result)
        if result["state"] == "rejected":
            raise typer.Exit(REJECTED)


@app.command()
def status(
    sweep: trials.Given, store: trials.WhereOption = options.DEFAULT_STORE, output: OutputOption = Output.text
) -> None:
    """Shows a sweep: how far each trial is, how well it does, and why one was stopped."""
    with reported(output):
        shown = sweep_display.gather(trials.open_sweep(sweep, store))
        print_json(shown.to_json()) if output is Output.json else sweep_display.print_table(shown)


app.command()(trials.stop)
app.command()(trials.resume)
app.command()(trials.fork)
