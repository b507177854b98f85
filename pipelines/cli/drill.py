"""`baton drill`: kill a recipe's processes again and again, on the user's own store, and show that nothing is lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from baton.pipelines.cli import options
from baton.pipelines.cli.display import Display, console
from baton.pipelines.cli.options import Output, OutputOption, print_json, reported
from baton.pipelines.compiling import prepare
from baton.pipelines.local.terminal import Terminal

if TYPE_CHECKING:
    from baton.pipelines.proving.drill import Kill, Report


def drill(
    recipe: options.RecipePath,
    kills: Annotated[int, typer.Option(min=1, help="How many processes to kill.")] = 20,
    seed: Annotated[int, typer.Option(help="Decides where in which phase each is killed.")] = 0,
    leave_out: options.LeaveOut = None,
    processes: options.Turns = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    output: OutputOption = Output.text,
) -> None:
    """Kills a recipe's chunks at random moments of every phase, and compares with a run that nobody disturbs.

    The exit code is 0 only where every run ends on the same losses and state, byte for byte, and every
    checkpoint that was committed reads back whole.
    """
    with reported(output):
        from baton.pipelines.proving import turns
        from baton.pipelines.proving.drill import Drill

        loaded = prepare.load_here(recipe, overrides, store=store, chunks=chunks)
        prepare.require_single(loaded, "drill")
        prepare.check_store(loaded)
        prepare.check_model(loaded)
        display = _Display(loaded.num_chunks)
        with display:
            report = Drill(
                loaded,
                kills=kills,
                seed=seed,
                name=f"drill-{prepare.new_run_name(loaded)}",
                leave_out=leave_out or (),
                processes=turns.parse(processes, loaded),
                on_event=display.heard,
                on_kill=lambda kill: display.killed(kill, kills),
            ).run()
        print_json(report) if output is Output.json else print_table(report)
        if not report["exact"]:
            raise typer.Exit(1)


class _Display(Display):
    def killed(self, kill: Kill, of: int) -> None:
        """Shows a kill in the place of the stage that it ended."""
        for task in self._progress.tasks:
            if not task.finished:
                self._progress.remove_task(task.id)
        self._stage = None
        stage, phases = kill["stage"].replace("_", " "), " and ".join(kill["found"]) or "between phases"
        console.print(f"[red]killed[/] {kill['number']}/{of}: {stage} {kill['chunk']}, {phases}")


def print_table(report: Report) -> None:
    """Prints a drill for people.

    Args:
        report: What `Drill.run` returned.
    """
    table = Table("kill", "asked for", "died in", "chunk", "step", "committed then", "trains again after")
    for kill in report["kills"]:
        seconds, place = kill["seconds_to_training"], str(kill["chunk"])
        table.add_row(
            str(kill["number"]),
            kill["asked"],
            ", ".join(kill["found"]) or "between phases",
            place if kill["stage"] == "train_chunk" else f"{place}, its check",
            str(kill["step"]),
            ", ".join(map(str, kill["committed"])) or "nothing",
            "–" if seconds is None else f"{seconds:.1f} s",
        )
    screen = Terminal(highlight=False)
    screen = screen if screen.is_terminal else Terminal(highlight=False, width=120)
    screen.print(table)
    for name in report["unreachable"]:
        screen.print(f"no process was found in phase {name}")
    for run in report["runs"]:
        if run["difference"]:
            screen.print(f"{run['run']} differs: {json.dumps(run['difference'])}", markup=False, soft_wrap=True)
        for problem in run["problems"]:
            screen.print(f"{run['run']}: {problem}", markup=False, soft_wrap=True)
    screen.print(verdict(report), soft_wrap=True)


def verdict(report: Report) -> str:
    """Returns the sentence that a drill comes down to."""
    count, digest = len(report["kills"]), report["undisturbed"]["state_digest"][:16]
    short = f" ({report['wanted']} were asked for)" if count < report["wanted"] else ""
    told = f"{count} kill(s){short} in {len(report['runs'])} run(s)"
    if report["exact"]:
        return f"exact: after {told} the state is {digest}, as undisturbed, and every checkpoint is whole"
    return f"NOT exact: after {told} not every run is as the undisturbed one, state {digest}"
