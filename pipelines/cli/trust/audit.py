"""`baton audit`: a chunk of somebody's run, trained again and compared bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from baton.components.shared.recipe.hooks import code_in
from baton.components.shared.runs.run import Run
from baton.pipelines.cli import options
from baton.pipelines.cli.display import Display
from baton.pipelines.cli.options import Output, OutputOption, print_json, reported
from baton.pipelines.cli.trust.keys import read_public
from baton.pipelines.compiling import prepare, trust
from baton.pipelines.compiling.origin import Origin

if TYPE_CHECKING:
    from baton.pipelines.proving.audit import Audit

TOLD = 8
"""Values that differ which a terminal shows."""


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
    output: OutputOption = Output.text,
) -> None:
    """Trains one chunk of a run again, here, and compares weights, optimizer, random state and logged losses.

    It begins with the checkpoint that the chunk began with, which chunks.keep.audit keeps, and writes nothing into the
    run's store. The exit code is 0 where all is equal, 1 where something differs, 2 where it cannot be tried.
    """
    with reported(output):
        from baton.pipelines.local import warm
        from baton.pipelines.proving import audit as auditing
        from baton.pipelines.proving import audit_page

        run = Run.open(run_uri)
        run.require("recipe.json")
        page = options.page_path(report or f"audit-{run.name}-{chunk}.html")
        public = read_public(key) if key else None
        loaded = prepare.load_here(recipe, overrides) if recipe else None
        code = code_in(run.recipe().model_dump(mode="json", exclude_defaults=True))
        trust.require_consent(Origin(run.uri, "", ""), code if "://" in run_uri else [])
        warm.start()
        with Display(len(run.plan().targets)) as display:
            found = auditing.audit(run, chunk, recipe=loaded, key=public, on_event=display.heard)
        audit_page.write(found, page)
        print_json({**found, "report": page}) if output is Output.json else _print(found, page)
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
