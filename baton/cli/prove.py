"""`baton verify`: chunk counts, kills, replay of a chunk, seals, checkpoints, exports, signatures and keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from baton.cli import address, options, runs
from baton.cli.address import RunArgument
from baton.cli.display import Display, Verbosity, console
from baton.cli.local import begun_by, given
from baton.cli.runs import read_public
from baton.local import forkserver
from baton.recipe.run import code_in
from baton.source import prepare
from baton.source.origin import RecipeSource
from baton.terminal import Terminal

if TYPE_CHECKING:
    from baton.prove.audit import Audit
    from baton.prove.drill import DrillReport, Kill


class Checks(options.Commands):
    """Group that takes a run, or an export's folder, in the place of a command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_target = self.get_command(ctx, args[0]) is None and ("/" in args[0] or os.path.exists(args[0]))
        return super().resolve_command(ctx, ["run", *args] if is_target else args)


app = typer.Typer(help="Check that training, checkpoints and exports are exact", no_args_is_help=True)


@app.command("chunks")
def prove(
    recipe: options.RecipePath,
    chunks: Annotated[str, typer.Option(help="Numbers of chunks, separated by commas.")] = "1,2,5",
    leave_out: options.LeaveOut = None,
    processes: options.Turns = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Page to write. Default: in STORE/pages.")
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Check that 1, 2 and 5 chunks match, byte for byte.

    Runs the recipe once per number of chunks, in fresh processes. Writes a page with all curves and the first
    difference. Exit code: 0 equal, 1 different. With --leave-out, a negative control, it is 0 where the runs differ, as
    they should, and 1 where they are equal, which proves nothing.
    """
    with options.answer(json, trust):
        from baton.prove import prove as proving

        counts = proving.parse_counts(chunks)
        loaded = prepare.load(recipe, overrides, store=store).localised()
        kind = "-".join(["prove", loaded.name, *(f"without-{part}" for part in leave_out or ())])
        page = options.page_path(report) if report else options.default_page(loaded.store.uri, f"{kind}.html")
        prepare.require_single(loaded, "prove")
        numbers = proving.parse_processes(processes, loaded)
        prepare.check_store(loaded)
        forkserver.start()
        prepare.check_model(loaded)
        display = _Display(0)
        words = ["verify", "chunks", recipe, "--chunks", chunks, *given("--set", *(overrides or ()))]
        with begun_by([*words, *given("--store", store)]), display:
            proof = proving.prove(
                loaded,
                counts,
                name=f"prove-{prepare.new_run_name(loaded)}",
                leave_out=leave_out or (),
                processes=numbers,
                on_event=display.heard,
                on_run=display.begins,
            )
        proof["report"] = page
        Path(page).write_text(proving.render(proof), encoding="utf-8")
        options.print_json(proof) if json else proving.print_table(proof)
        if not proving.is_as_expected(leave_out or (), exact=proof["exact"]):
            raise typer.Exit(1)


@app.command("kills")
def drill(
    recipe: options.RecipePath,
    kills: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the kills' places.")] = 0,
    leave_out: options.LeaveOut = None,
    processes: options.Turns = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Kill training at random moments and compare with an undisturbed run.

    Exit code 0 means that losses and state match byte for byte, and that every committed checkpoint is whole. With
    --leave-out, a negative control, it means that they differ, as they should.
    """
    with options.answer(json, trust):
        from baton.prove.drill import Drill
        from baton.prove.prove import is_as_expected, parse_processes

        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks).localised()
        prepare.require_single(loaded, "drill")
        prepare.check_store(loaded)
        prepare.check_model(loaded)
        display = _Display(loaded.num_chunks)
        words = ["verify", "kills", recipe, "--kills", str(kills), *given("--set", *(overrides or ()))]
        with begun_by([*words, *given("--store", store), *given("--chunks", chunks)]), display:
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
        differs = any(run["difference"] for run in report["runs"])
        is_whole = bool(report["runs"]) and not any(run["problems"] for run in report["runs"])
        if not (is_whole and is_as_expected(leave_out or (), exact=not differs)):
            raise typer.Exit(1)


class _Display(Display):
    def begins(self, num_chunks: int) -> None:
        """Shows that a run of so many chunks begins."""
        self.num_chunks = num_chunks
        if not Verbosity.is_quiet:
            console.print(f"[bold]{num_chunks} chunk{'' if num_chunks == 1 else 's'}[/]")

    def killed(self, kill: Kill, of: int) -> None:
        """Shows a kill in the place of the stage that it ended."""
        for name in list(self._running):
            self._forget(name)
        stage, phases = kill["stage"].replace("_", " "), " and ".join(kill["found"]) or "between phases"
        console.print(f"[red]killed[/] {kill['number']}/{of}: {stage} {kill['chunk']}, {phases}")


def print_table(report: DrillReport) -> None:
    """Prints a drill for people."""
    from baton.prove.prove import control

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
        if difference := run["difference"]:
            place = f" at step {difference['step']:,}" if "step" in difference else ""
            values = f"expected {difference['expected']}, found {difference['found']}"
            screen.print(
                f"{run['run']} differs, first in {difference['what']}{place}: {values}", markup=False, soft_wrap=True
            )
        for problem in run["problems"]:
            screen.print(f"{run['run']}: {problem}", markup=False, soft_wrap=True)
    screen.print(verdict(report), soft_wrap=True)
    if told := control(report["leave_out"], exact=not any(run["difference"] for run in report["runs"])):
        screen.print(told, markup=False, soft_wrap=True)


def verdict(report: DrillReport) -> str:
    """Returns the verdict of a drill in one sentence."""
    count, digest = len(report["kills"]), report["undisturbed"]["state_digest"][:16]
    short = f" ({report['wanted']} were asked for)" if count < report["wanted"] else ""
    told = f"{count} kill(s){short} in {len(report['runs'])} run(s)"
    if report["exact"]:
        return f"exact: after {told} the state is {digest}, as in the undisturbed run; every checkpoint is whole"
    return f"NOT exact: after {told}, a run differs from the undisturbed one, state {digest}"


app.add_typer(runs.keys_app, name="keys", cls=options.Commands)
app.command("run")(runs.verify_chain)
app.command("checkpoints")(runs.verify)
app.command("exports")(runs.verify_exports)
app.command("decisions")(runs.verify_decisions)
app.command("signature")(runs.signature)
TOLD = 8  # differing values on a terminal


@app.command("replay")
def audit(
    run_uri: RunArgument,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Recipe with your copy of the data, to be tokenized again."),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Number of the chunk, from 1.")] = 1,
    key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Public key by which the checkpoints must be signed.")
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Page to write. Default: in Baton's cache.")
    ] = None,
    overrides: options.Overrides = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Train one chunk of a run again, and compare weights, state and losses.

    Starts from the chunk's first checkpoint, kept by chunks.keep.audit. Writes nothing into the run's store. Exit code:
    0 equal, 1 different, 2 not possible.
    """
    with options.answer(json, trust):
        from baton.prove import audit as auditing

        run = address.resolve(run_uri).run
        run.require("recipe.json")
        name = f"audit-{run.name}-{chunk}.html"
        page = options.page_path(report) if report else options.default_page(None, name)
        public = read_public(key) if key else None
        loaded = prepare.load(recipe, overrides).localised() if recipe else None
        code = code_in(run.recipe().model_dump(mode="json", exclude_defaults=True))
        prepare.refuse_untrusted(RecipeSource(run.uri, "", ""), [] if run.storage.is_local else code)
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
