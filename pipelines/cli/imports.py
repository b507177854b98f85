"""`baton import`: a recipe from another trainer's file, and a list of what it could not carry over."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from baton.components.shared.core.errors import UserError
from baton.pipelines.cli import options
from baton.pipelines.cli.options import print_json, reported
from baton.pipelines.importing import axolotl, llamafactory, reading, writing
from baton.pipelines.importing.trainer import Trainer

app = typer.Typer(
    help="Turn another trainer's file into a recipe, and list what it could not carry over.", no_args_is_help=True
)

TheirFile = Annotated[str, typer.Argument(metavar="FILE.yaml", help="Training file to read.", show_default=False)]
Target = Annotated[
    str | None,
    typer.Option("-o", "--output", metavar="RECIPE.yaml", help="Where to write the recipe; printed when left out."),
]


@app.command("llamafactory")
def import_llamafactory(file: TheirFile, output: Target = None) -> None:
    """Makes a recipe from a LLaMA-Factory training file.

    Data sets are looked up in dataset_info.json: in dataset_dir, or beside the file.
    """
    with reported():
        _import(llamafactory.TRAINER, file, output)


@app.command("axolotl")
def import_axolotl(file: TheirFile, output: Target = None) -> None:
    """Makes a recipe from an axolotl training file."""
    with reported():
        _import(axolotl.TRAINER, file, output)


def _import(trainer: Trainer, file: str, output: str | None) -> None:
    if output and os.path.exists(output):
        raise UserError(f"{output!r} exists already.", remedy="Give another name, or remove it.")
    draft = reading.draft_of(trainer, file, os.path.dirname(output or "") or os.getcwd())
    recipe = writing.recipe_of(draft)
    document = writing.to_yaml(recipe, draft)
    if output:
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        with open(output, "x", encoding="utf-8") as opened:
            opened.write(document)
    lines = list(writing.report(draft, output or recipe.name))
    if options.as_json():
        print_json({"state": "imported", "recipe": output, "yaml": document, "report": lines})
        return
    if output is None:
        typer.echo(document, nl=False)
    for line in lines:
        typer.echo(line, err=output is None)
    if output:
        typer.echo(f"next: baton validate {shlex.quote(output)}")
