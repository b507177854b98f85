"""`baton prove`, `drill` and `audit`: try exact resume in chunks, under kills, and on another's run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from baton.cli import options
from baton.cli.display import Display, console
from baton.cli.runs import read_public
from baton.local import forkserver
from baton.recipe.run import code_in
from baton.runs.run import Run
from baton.source import prepare
from baton.source.origin import RecipeSource
from baton.terminal import Terminal

if TYPE_CHECKING:
    from baton.prove.audit import Audit
    from baton.prove.drill import DrillReport, Kill


def prove(
    recipe: options.RecipePath,
    chunks: Annotated[str, typer.Option(help="Numbers of chunks to compare, by commas.")] = "1,2,5",
    leave_out: options.LeaveOut = None,
    processes: options.Turns = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Page to write; prove-<recipe's name>.html when left out.")
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Runs a recipe once per number of chunks, in fresh processes, and compares losses and state byte for byte.

    The page that it writes shows the curves over each other and what differs, if anything does.
    """
    with options.answer(json, trust):
        from baton.prove import prove as proving

        counts = proving.parse_counts(chunks)
        loaded = prepare.load(recipe, overrides, store=store).localised()
        page = options.page_path(report or f"prove-{loaded.name}.html")
        prepare.require_single(loaded, "prove")
        numbers = proving.parse_processes(processes, loaded)
        prepare.check_store(loaded)
        forkserver.start()
        prepare.check_model(loaded)
        with Display(max(counts)) as display:
            name = f"prove-{prepare.new_run_name(loaded)}"
            proof = proving.prove(
                loaded, counts, name=name, leave_out=leave_out or (), processes=numbers, on_event=display.heard
            )
        proof["report"] = page
        Path(page).write_text(proving.render(proof), encoding="utf-8")
        options.print_json(proof) if json else proving.print_table(proof)
        if not proof["exact"]:
            raise typer.Exit(1)


def drill(
    recipe: options.RecipePath,
    kills: Annotated[int, typer.Option(min=1, help="How many processes to kill.")] = 20,
    seed: Annotated[int, typer.Option(help="Decides where in which phase each is killed.")] = 0,
    leave_out: options.LeaveOut = None,
    processes: options.Turns = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Kills a recipe's chunks at random moments of every phase, and compares with a run that nobody disturbs.

    The exit code is 0 only where every run ends on the same losses and state, byte for byte, and every
    checkpoint that was committed reads back whole.
    """
    with options.answer(json, trust):
        from baton.prove.drill import Drill
        from baton.prove.prove import parse_processes

        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks).localised()
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
                processes=parse_processes(processes, loaded),
                on_event=display.heard,
                on_kill=lambda kill: display.killed(kill, kills),
            ).run()
        options.print_json(report) if json else print_table(report)
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


def print_table(report: DrillReport) -> None:
    """Prints a drill for people."""
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


def verdict(report: DrillReport) -> str:
    """Returns the verdict of a drill in one sentence."""
    count, digest = len(report["kills"]), report["undisturbed"]["state_digest"][:16]
    short = f" ({report['wanted']} were asked for)" if count < report["wanted"] else ""
    told = f"{count} kill(s){short} in {len(report['runs'])} run(s)"
    if report["exact"]:
        return f"exact: after {told} the state is {digest}, as undisturbed, and every checkpoint is whole"
    return f"NOT exact: after {told} not every run is as the undisturbed one, state {digest}"


TOLD = 8  # differing values on a terminal


def audit(
    run_uri: options.RunUri,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]", help="The recipe with your copy of the data: rows are read and tokenized anew from it."
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Number of the chunk, from 1.")] = 1,
    key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Public key by which the checkpoints must be signed.")
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Page to write; audit-RUN-CHUNK.html when left out.")
    ] = None,
    overrides: options.Overrides = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Trains one chunk of a run again, here, and compares weights, optimizer, random state and logged losses.

    It begins with the checkpoint that the chunk began with, which chunks.keep.audit keeps, and writes nothing into the
    run's store. The exit code is 0 where all is equal, 1 where something differs, 2 where it cannot be tried.
    """
    with options.answer(json, trust):
        from baton.prove import audit as auditing

        run = Run.open(run_uri)
        run.require("recipe.json")
        page = options.page_path(report or f"audit-{run.name}-{chunk}.html")
        public = read_public(key) if key else None
        loaded = prepare.load(recipe, overrides).localised() if recipe else None
        code = code_in(run.recipe().model_dump(mode="json", exclude_defaults=True))
        prepare.refuse_untrusted(RecipeSource(run.uri, "", ""), code if "://" in run_uri else [])
        forkserver.start()
        with Display(len(run.plan().targets)) as display:
            found = auditing.audit(run, chunk, recipe=loaded, key=public, on_event=display.heard)
        Path(page).write_text(auditing.render_page(found), encoding="utf-8")
        options.print_json({**found, "report": page}) if json else _print(found, page)
        if not found["equal"]:
            raise typer.Exit(1)


def _print(audit: Audit, page: str) -> None:
    first, loss = audit["first_difference"], audit["first_loss"]
    for entry in (first, loss if loss != first else None):
        if entry:
            found = f"{entry['expected']!r} in the run, {entry['found']!r} here"
            typer.echo(f"step {entry['step']}: {entry['name']} {found}")
    for value in audit["differing"][:TOLD]:
        largest = f", by {value['max_abs']:.3g} at most" if value["max_abs"] is not None else ""
        of = f"{value['count']:,} of {value['of']:,} differ{largest}" if value["name"] else ""
        typer.echo(f"{value['file']} {value['name']}: {value['what']} {of}".rstrip())
    if (more := audit["num_differing"] - TOLD) > 0:
        typer.echo(f"and {more:,} more")
    if audit["differences"]:
        typer.echo(f"this machine is not the run's: {'; '.join(audit['differences'])}")
    typer.echo(audit["verdict"])
    typer.echo(f"report: {page}")
