"""`baton init` and `baton import`: a first recipe from rows, or from another trainer's file."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.display import Display
from baton.cli.options import print_json, reported
from baton.errors import BatonError, UserError, suggest_path
from baton.importers import files
from baton.importers.files import OtherTrainer
from baton.local import preview
from baton.recipe.recipe import Recipe
from baton.runs.documents import Survey
from baton.source import prepare, starter
from baton.source.origin import STDIN, RecipeSource
from baton.source.starter import SCRATCH, Plan
from baton.store import sources

# --- `baton init`: a first recipe for a method, a model, and rows that it has looked at.


SUGGESTED = "Qwen/Qwen3-0.6B"
"""Model that is proposed where a person is asked for one."""


def init(
    method: Annotated[
        str | None, typer.Option(help="Training method; the one that suits the rows when left out.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hub id, folder or URI; `scratch` for a small one of its own.", show_default=False),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help="Rows, as data.source. Repeatable.", show_default=False)
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="RECIPE.yaml", help="Where to write it; printed when left out."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of a LoRA adapter.")] = False,
    teacher: Annotated[str | None, typer.Option(help="With distillation: the model to learn from.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Writes a first recipe for rows that it has looked at: a method they serve, and values with the reasons for them.

    Nothing is fetched from the hub. On a terminal it asks for what is left out.
    """
    with reported():
        asks = not options.as_json() and sys.stdin.isatty() and sys.stderr.isatty()
        if output:
            _refuse_file(output, force)
        given = list(data or ()) or _asked(asks, "data", "Rows (file, folder or URI)", None).split()
        rows = _Rows.look(given)
        chosen = _method(method, rows, asks)
        starter.require_fit(rows.survey, chosen, rows.label)
        start = os.path.expanduser(model or _asked(asks, "model", "Model (hub id, folder, or scratch)", SUGGESTED))
        _check(start, chosen, teacher)
        name = _name(given[0], chosen)
        target = output or (_asked(asks, "output", "File to write", f"{name}.yaml") if asks else None)
        if target and not output:
            _refuse_file(target, force)
        _make(rows, chosen, start, target, name, full=full, teacher=teacher)


@dataclass(frozen=True)
class _Rows:
    """Rows, and what was found in them."""

    label: str
    sources: list[str]
    survey: Survey

    @classmethod
    def look(cls, given: list[str]) -> _Rows:
        """Looks at sources, as they are given."""
        found = [sources.resolve(source, base_dir=os.getcwd()) for source in given]
        with Display(0):
            return cls(", ".join(given), found, preview.survey(found))


def _make(
    rows: _Rows, method: str, model: str, target: str | None, name: str, *, full: bool, teacher: str | None
) -> None:
    """Chooses the values, checks the recipe that they make, writes it and tells of it."""
    folder = os.path.dirname(os.path.abspath(target or "recipe.yaml"))

    def written(lengths: list[int]) -> tuple[Plan, str]:
        plan = starter.plan(rows.survey, method, model, full=full, teacher=teacher, lengths=lengths, source=rows.label)
        there = [_reach(source, folder) for source in rows.sources]
        base = _reach(model, folder) if os.path.isdir(model) else model
        return plan, starter.to_yaml(plan, rows.survey, name=name, model=base, sources=there)

    _, rough = written([])
    with Display(0) as display:
        recipe = _checked(rough, target, folder)
        is_here = model == SCRATCH or preview.is_at_hand(model)
        lengths = preview.lengths(recipe, display.heard) if is_here else []
    plan, text = written(lengths)
    prepare.check_model(_checked(text, target, folder))
    _answer(plan, rows.survey, text, target, bool(lengths))


def _refuse_file(path: str, force: bool) -> None:
    if os.path.exists(path) and not force:
        raise UserError(f"{path!r} exists already.", remedy="Give another name, or --force to overwrite it.")


def _method(method: str | None, rows: _Rows, asks: bool) -> str:
    """Returns the method: the one that is named, or that suits the rows and is not declined."""
    if method:
        return method.lower()
    suits = starter.method_for(rows.survey, rows.label)
    would = ", ".join(starter.usable_by(rows.survey))
    return _asked(asks, "method", f"Method ({would})", suits) if asks else suits


def _asked(asks: bool, option: str, question: str, default: str | None) -> str:
    """Returns what a person at a terminal answers.

    Raises:
        UserError: there is none to be asked.
    """
    if not asks:
        example = {"data": "rows.jsonl", "model": f"{SUGGESTED}, a folder, or {SCRATCH}"}[option]
        raise UserError(
            f"--{option} is left out, and there is no terminal to ask at.", remedy=f"Give --{option} {example}."
        )
    answer: str = typer.prompt(question, default=default, err=True)
    return answer


def _check(model: str, method: str, teacher: str | None) -> None:
    """Checks what goes together.

    Raises:
        UserError: it does not, or the model is a path that does not exist.
    """
    if (method == "distillation") != bool(teacher):
        if teacher:
            raise UserError(f"--teacher is for distillation, not for {method}.", remedy="Leave it out.")
        raise UserError("distillation learns from a teacher.", remedy="Name it: --teacher Qwen/Qwen3-8B.")
    is_path = model.startswith((".", "/", "~")) or (model.count("/") > 1 and "://" not in model)
    if is_path and not os.path.isdir(model):
        near = suggest_path(model, [os.getcwd()])
        raise UserError(f"--model {model!r} is not a folder.", remedy=f"Did you mean {near!r}?" if near else None)
    if method == "distillation" and model == SCRATCH:
        remedy = "Give --model a base of the teacher's family."
        raise UserError("a model from scratch has other tokens than a teacher.", remedy=remedy)


def _name(source: str, method: str) -> str:
    """Returns a recipe's name for rows and a method."""
    stem = os.path.basename(source.partition("?")[0].rstrip("/")).partition(".")[0].lower()
    slug = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-")
    return f"{slug or 'rows'}-{method}"


def _reach(path: str, folder: str) -> str:
    """Returns a local path as a recipe in a folder should name it: from there where it is near."""
    if "://" in path or path.startswith("builtin:"):
        return path
    absolute = os.path.abspath(os.path.expanduser(path))
    near = os.path.relpath(absolute, folder)
    return absolute if near.startswith(os.path.join("..", "..", "..")) else near


def _checked(text: str, target: str | None, folder: str) -> Recipe:
    """Returns what a file's text says, as `baton validate` reads it."""
    try:
        return prepare.load(RecipeSource(target or STDIN, text, folder)).localised()
    except UserError as error:
        raise BatonError(f"what was chosen makes no recipe: {error}") from error


def _answer(plan: Plan, survey: Survey, text: str, target: str | None, is_measured: bool) -> None:
    if target:
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
    would = starter.usable_by(survey)
    if options.as_json():
        print_json(
            {
                "state": "written" if target else "made",
                "recipe": target,
                "yaml": text,
                "method": plan.method,
                "methods": would,
                "format": plan.fit.format,
                "columns": survey.columns,
                "rows": survey.rows,
                "max_length": plan.max_length,
                "lengths_counted": is_measured,
            }
        )
        return
    if not target:
        typer.echo(text, nl=False)
    rows = f"{survey.rows:,} rows" if survey.rows is not None else "rows"
    others = [name for name in would if name != plan.method]
    also = f" ({', '.join(others)} would do, too)" if others else ""
    typer.echo(f"{rows} of {plan.fit.format}: {plan.method}{also}", err=True)
    typer.echo(f"data.max_length is {plan.max_length}. {plan.length_reason}", err=True)
    if plan.method == "sft" and "kto" in would and survey.of("kto").format == "rated":
        typer.echo("note: sft learns the answers that are rated bad, too; kto learns from the rating", err=True)
    if target:
        typer.echo(f"wrote {target}; next: baton validate {shlex.quote(target)}", err=True)


# --- `baton import`: a recipe from another trainer's file, and a list of what it could not carry over.


import_app = typer.Typer(
    help="Turn another trainer's file into a recipe, and list what it could not carry over.", no_args_is_help=True
)

TheirFile = Annotated[str, typer.Argument(metavar="FILE.yaml", help="Training file to read.", show_default=False)]
Target = Annotated[
    str | None,
    typer.Option("-o", "--output", metavar="RECIPE.yaml", help="Where to write the recipe; printed when left out."),
]


@import_app.command("llamafactory")
def import_llamafactory(file: TheirFile, output: Target = None) -> None:
    """Makes a recipe from a LLaMA-Factory training file.

    Data sets are looked up in dataset_info.json: in dataset_dir, or beside the file.
    """
    with reported():
        from baton.importers import llamafactory  # whose tables take a while to read

        _import(llamafactory.TRAINER, file, output)


@import_app.command("axolotl")
def import_axolotl(file: TheirFile, output: Target = None) -> None:
    """Makes a recipe from an axolotl training file."""
    with reported():
        from baton.importers import axolotl

        _import(axolotl.TRAINER, file, output)


def _import(trainer: OtherTrainer, file: str, output: str | None) -> None:
    if output and os.path.exists(output):
        raise UserError(f"{output!r} exists already.", remedy="Give another name, or remove it.")
    draft = files.draft_of(trainer, file, os.path.dirname(output or "") or os.getcwd())
    recipe = files.recipe_of(draft)
    document = files.to_yaml(recipe, draft)
    if output:
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        with open(output, "x", encoding="utf-8") as opened:
            opened.write(document)
    lines = list(files.import_report(draft, output or recipe.name))
    if options.as_json():
        print_json({"state": "imported", "recipe": output, "yaml": document, "report": lines})
        return
    if output is None:
        typer.echo(document, nl=False)
    for line in lines:
        typer.echo(line, err=output is None)
    if output:
        typer.echo(f"next: baton validate {shlex.quote(output)}")
