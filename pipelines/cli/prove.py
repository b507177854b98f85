"""`baton prove`: a recipe in several numbers of chunks, compared bit for bit."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.pipelines.cli import options
from baton.pipelines.cli.display import Display
from baton.pipelines.cli.options import Output, OutputOption, print_json, reported
from baton.pipelines.compiling import prepare


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
    output: OutputOption = Output.text,
) -> None:
    """Runs a recipe once per number of chunks, in fresh processes, and compares losses and state byte for byte.

    The page that it writes shows the curves over each other and what differs, if anything does.
    """
    with reported(output):
        from baton.pipelines.local import warm
        from baton.pipelines.proving import prove as proving
        from baton.pipelines.proving import prove_page, turns

        counts = proving.parse_counts(chunks)
        loaded = prepare.load_here(recipe, overrides, store=store)
        page = options.page_path(report or f"prove-{loaded.name}.html")
        prepare.require_single(loaded, "prove")
        numbers = turns.parse(processes, loaded)
        prepare.check_store(loaded)
        warm.start()
        prepare.check_model(loaded)
        with Display(max(counts)) as display:
            name = f"prove-{prepare.new_run_name(loaded)}"
            proof = proving.prove(
                loaded, counts, name=name, leave_out=leave_out or (), processes=numbers, on_event=display.heard
            )
        proof["report"] = page
        prove_page.write(proof, page)
        print_json(proof) if output is Output.json else proving.print_table(proof)
        if not proof["exact"]:
            raise typer.Exit(1)
