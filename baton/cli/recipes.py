"""`baton init` and `baton recipe`; also `compile`, `validate` and `doctor`."""

import importlib
import os
import re
import shlex
import sys
from enum import StrEnum
from json import dumps
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from baton.cli import options
from baton.cli.display import Display, screen
from baton.compiler import pipeline_file
from baton.errors import BatonError, UserError, suggest_path
from baton.importers import draft as drafts
from baton.local import preview
from baton.recipe.methods import TAUGHT
from baton.recipe.recipe import Recipe
from baton.recipe.training import Guard
from baton.runs.documents import Survey
from baton.source import hardware, origin, prepare, starter
from baton.store import sources
from baton.sweep.search import brackets, check_trials

app = typer.Typer(help="List and print bundled recipes; print the schema", no_args_is_help=True)
import_app = typer.Typer(help="Convert another tool's file", no_args_is_help=True)  # of earlier releases, as the next
former_app = typer.Typer(help="List and print bundled recipes")

WIDE = 110  # columns from which all of a list fits
SUGGESTED = "Qwen/Qwen3-0.6B"  # proposed where a person is asked
TheirFile = Annotated[str, typer.Argument(metavar="FILE.yaml", help="Training file to read.", show_default=False)]
Target = Annotated[
    str | None,
    typer.Option("-o", "--output", metavar="RECIPE.yaml", help="File to write. Default: standard output."),
]


class Tool(StrEnum):
    axolotl = "axolotl"
    llamafactory = "llamafactory"


def init(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="With --from: training file to convert.", show_default=False)
    ] = None,
    tool: Annotated[
        Tool | None, typer.Option("--from", help="Convert a training file of this tool.", show_default=False)
    ] = None,
    is_list: Annotated[bool, typer.Option("--list", help="List the bundled recipes.")] = False,
    method: Annotated[
        str | None, typer.Option(help="Training method. Default: chosen by the rows.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hub id, folder or URI; `scratch` for a small new one.", show_default=False),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help="Rows, as data.source. Repeatable.", show_default=False)
    ] = None,
    output: Target = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of a LoRA adapter.")] = False,
    teacher: Annotated[str | None, typer.Option(help=f"With {' and '.join(TAUGHT)}: the model to learn from.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    json: options.Json = False,
) -> None:
    """Write a first recipe from your rows or another tool's file.

    Chooses a method that fits the rows, and explains each value in a comment. Fetches nothing from the hub. Asks for
    missing options on a terminal.
    """
    if is_list:
        list_recipes(json)
        return
    with options.answer(json):
        if (file is None) != (tool is None):
            remedy = "Give both, as in `baton init --from axolotl config.yml`; rows of your own go to --data."
            raise UserError("FILE and --from need each other.", remedy=remedy)
    if file and tool:
        _import(tool, file, output, json)
        return
    with options.answer(json):
        asks = not json and sys.stdin.isatty() and sys.stderr.isatty()
        _refuse_file(output, force)
        given = list(data or ()) or _asked(asks, "data", "Rows (file, folder or URI)", None).split()
        found, label = [sources.resolve(source, base_dir=os.getcwd()) for source in given], ", ".join(given)
        with Display(0):
            survey = preview.survey(found)
        usable = starter.usable_by(survey)
        if not method:
            method = starter.method_for(survey, label)
            method = _asked(asks, "method", f"Method ({', '.join(usable)})", method) if asks else method
        method = method.lower()
        starter.require_fit(survey, method, label)
        start = os.path.expanduser(model or _asked(asks, "model", "Model (hub id, folder, or scratch)", SUGGESTED))
        _check(start, method, teacher)
        stem = os.path.basename(given[0].partition("?")[0].rstrip("/")).partition(".")[0].lower()
        name = f"{re.sub(r'[^a-z0-9]+', '-', stem).strip('-')[:40].strip('-') or 'rows'}-{method}"
        if asks and not output:
            output = _asked(asks, "output", "File to write", f"{name}.yaml")
            _refuse_file(output, force)
        folder = os.path.dirname(os.path.abspath(output or "recipe.yaml"))

        def written(lengths: list[int]) -> tuple[starter.StarterPlan, str]:
            plan = starter.plan(survey, method, start, full=full, teacher=teacher, lengths=lengths, source=label)
            there = [_reach(source, folder) for source in found]
            base = _reach(start, folder) if os.path.exists(start) else start
            return plan, starter.to_yaml(plan, survey, name=name, model=base, sources=there)

        with Display(0) as display:
            rough = _checked(written([])[1], output, folder)
            is_here = start == starter.SCRATCH or preview.is_at_hand(start)
            lengths = preview.lengths(rough, display.heard) if is_here else []
        plan, text = written(lengths)
        prepare.check_model(_checked(text, output, folder))
        if output:
            _write(output, text)
        if json:
            options.print_json(
                {
                    "state": "written" if output else "made",
                    "recipe": output,
                    "yaml": text,
                    "method": method,
                    "methods": usable,
                    "format": plan.fit.format,
                    "columns": survey.columns,
                    "rows": survey.rows,
                    "max_length": plan.max_length,
                    "lengths_counted": bool(lengths),
                }
            )
        else:
            _explain(plan, survey, usable, text, output)


def _explain(plan: starter.StarterPlan, survey: Survey, usable: list[str], text: str, target: str | None) -> None:
    if not target:
        typer.echo(text, nl=False)
    rows = f"{survey.rows:,} rows" if survey.rows is not None else "rows"
    others = [name for name in usable if name != plan.method]
    also = f" ({', '.join(others)} would do, too)" if others else ""
    typer.echo(f"{rows} of {plan.fit.format}: {plan.method}{also}", err=True)
    typer.echo(f"data.max_length is {plan.max_length}. {plan.length_reason}", err=True)
    if plan.method == "sft" and "kto" in usable and survey.of("kto").format == "rated":
        typer.echo("note: sft learns the answers that are rated bad, too; kto learns from the rating", err=True)
    if target:
        typer.echo(f"wrote {target}; next: baton check {shlex.quote(target)}", err=True)


def _refuse_file(path: str | None, force: bool) -> None:
    if path and os.path.exists(path) and not force:
        raise UserError(f"{path!r} exists already.", remedy="Give another name, or --force to overwrite it.")


def _asked(asks: bool, option: str, question: str, default: str | None) -> str:
    if not asks:
        example = {"data": "rows.jsonl", "model": f"{SUGGESTED}, a folder, or {starter.SCRATCH}"}[option]
        raise UserError(
            f"--{option} is left out, and there is no terminal to ask at.", remedy=f"Give --{option} {example}."
        )
    words: str = typer.prompt(question, default=default, err=True)
    return words


def _check(model: str, method: str, teacher: str | None) -> None:
    if (method in TAUGHT) != bool(teacher):
        if teacher:
            raise UserError(f"--teacher is for {' and '.join(TAUGHT)}, not for {method}.", remedy="Leave it out.")
        raise UserError(f"{method} learns from a teacher.", remedy="Name it: --teacher Qwen/Qwen3-8B.")
    is_path = model.startswith((".", "/", "~")) or (model.count("/") > 1 and "://" not in model)
    if is_path and not os.path.exists(model):
        near = suggest_path(model, [os.getcwd()])
        raise UserError(f"--model {model!r} does not exist.", remedy=f"Did you mean {near!r}?" if near else None)
    if teacher and model == starter.SCRATCH:
        remedy = "Give --model a base of the teacher's family."
        raise UserError("a model from scratch has other tokens than a teacher.", remedy=remedy)


def _reach(path: str, folder: str) -> str:
    """Returns a local path relative to the recipe's folder where it is near, else absolute."""
    if "://" in path or path.startswith("builtin:"):
        return path
    absolute = os.path.abspath(os.path.expanduser(path))
    near = os.path.relpath(absolute, folder)
    return absolute if near.startswith(os.path.join("..", "..", "..")) else near


def _checked(text: str, target: str | None, folder: str) -> Recipe:
    try:
        return prepare.load(origin.RecipeSource(target or origin.STDIN, text, folder)).localised()
    except UserError as error:
        raise BatonError(f"this choice makes no recipe: {error}") from error


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@import_app.command("llamafactory")
def import_llamafactory(file: TheirFile, output: Target = None, json: options.Json = False) -> None:
    """Convert a LLaMA-Factory training file.

    Datasets are looked up in dataset_info.json, in dataset_dir or the folder of FILE.
    """
    _import(Tool.llamafactory, file, output, json)


@import_app.command("axolotl")
def import_axolotl(file: TheirFile, output: Target = None, json: options.Json = False) -> None:
    """Convert an axolotl training file."""
    _import(Tool.axolotl, file, output, json)


def _import(tool: Tool, file: str, output: str | None, json: bool) -> None:
    with options.answer(json):
        trainer: drafts.OtherTrainer = importlib.import_module(f"baton.importers.{tool}").TRAINER  # slow to import
        if output and os.path.exists(output):
            raise UserError(f"{output!r} exists already.", remedy="Give another name, or remove it.")
        draft = drafts.draft_of(trainer, file, os.path.dirname(output or "") or os.getcwd())
        recipe = drafts.recipe_of(draft)
        document = drafts.to_yaml(recipe, draft)
        if output:
            _write(output, document)
        lines = list(drafts.import_report(draft, output or recipe.name))
        if json:
            options.print_json({"state": "imported", "recipe": output, "yaml": document, "report": lines})
            return
        if output is None:
            typer.echo(document, nl=False)
        for line in lines:
            typer.echo(line, err=output is None)
        if output:
            typer.echo(f"next: baton check {shlex.quote(output)}")


@former_app.callback(invoke_without_command=True)
def recipes(context: typer.Context, json: options.Json = False) -> None:
    """List and print bundled recipes."""
    if context.invoked_subcommand is None:
        list_recipes(json)


@app.command("list")
@former_app.command("list")
def list_recipes(json: options.Json = False) -> None:
    """List the bundled recipes."""
    with options.answer(json):
        listed = [origin.described(name) for name in origin.bundled()]
        if json:
            options.print_json({"recipes": listed})
            return
        out = screen()
        columns = ["name", "method", "model", "about"]
        if out.width < WIDE:  # the summary names the model
            columns.remove("model")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=column in ("name", "method"))
        for row in listed:
            table.add_row(*(row[column] for column in columns))
        out.print(table)
        typer.echo("run one: baton run NAME · copy one: baton recipe show NAME > my.yaml")


@app.command("show")
@former_app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a bundled recipe.", show_default=False)],
    json: options.Json = False,
) -> None:
    """Print a bundled recipe, for a file of your own."""
    with options.answer(json):
        found = origin.of_bundle(name)
        if json:
            options.print_json({**origin.described(name), "yaml": found.standalone()})
        else:
            typer.echo(found.standalone(), nl=False)


def validate(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Check a recipe: keys, values, files, first rows and memory."""
    with options.answer(json, trust):
        found = prepare.load(recipe, overrides)
        reports = reports_of(found)
        if json:
            options.print_json(facts_of(found, reports))
        else:
            print_reports(found, reports)


Reports = dict[str, list[str]]  # about → lines


def reports_of(found: prepare.LoadedRecipe) -> Reports:
    """Checks a recipe's files, first rows and model, and returns lines about it."""
    loaded, localised = found.recipe, found.localised()
    training, sweep = loaded.training, []
    if localised.sweep:
        rungs = sum(len(bracket.rungs) for bracket in brackets(loaded))
        sweep = [f"sweep: {check_trials(localised)} trials at {rungs} rung(s)"]
    seen = list(preview.describe_rows(localised))
    prepare.check_model(localised)
    return {
        "rows": seen,
        "sweep": sweep,
        "guard": [_guarded(training.guard, by_loss=training.generation is None)] if training.guard else [],
        "profile": list(hardware.explain_profile(loaded, found.choices)),
        "rendering": list(prepare.rendering_report(localised)),
        "memory": list(hardware.memory_report(localised)),
        "on_a_cluster": pipeline_file.cluster_warnings(loaded),
    }


def facts_of(found: prepare.LoadedRecipe, reports: Reports) -> dict[str, object]:
    """Returns the answer about a valid recipe for `--json`."""
    loaded, training = found.recipe, found.recipe.training
    return {
        "state": "valid",
        "recipe": found.origin.name,
        "name": loaded.name,
        "method": training.method,
        "phases": [{"name": phase.name, "method": phase.training.method} for phase in loaded.phase_recipes()],
        "epochs": None if training.max_steps else training.epochs or 1.0,
        "max_steps": training.max_steps,
        "batch_size": training.batch_size,
        "chunks": loaded.num_chunks,
        **reports,
    }


def print_reports(found: prepare.LoadedRecipe, reports: Reports, *, on_cluster: bool = True) -> None:
    """Prints the answer about a valid recipe for people."""
    loaded, training = found.recipe, found.recipe.training
    length = f"{training.max_steps} steps" if training.max_steps else f"{training.epochs or 1:g} epoch(s)"
    typer.echo(
        f"{found.origin.name} is valid: {loaded.name}, {training.method} for {length} at batch size "
        f"{training.batch_size} ({loaded.split}), in {loaded.num_chunks} chunk(s)."
    )
    for about in ("sweep", "guard", "rows", "profile", "rendering", "memory"):
        for line in reports[about]:
            typer.echo(line)
    for warning in reports["on_a_cluster"] if on_cluster else ():
        typer.echo(f"on a cluster: {warning}")


def _guarded(guard: Guard, *, by_loss: bool) -> str:
    limits = (("loss", guard.loss if by_loss else None), ("gradient norm", guard.grad_norm))
    bounds = [f"{name} is above {times:g} times" for name, times in limits if times]
    watched = ["loss or gradient norm is not finite"] if guard.nan else []
    watched += [f"{' or '.join(bounds)} the median of the last {guard.window}"] if bounds else []
    found = f"at most {guard.max_skips} steps whose {', or whose '.join(watched)}" if watched else ""
    known = f"step {', '.join(map(str, guard.skip))}" if guard.skip else ""
    return f"guard: skips {', and '.join(part for part in (found, known) if part)}"


@app.command()
def schema(json: options.Json = False) -> None:
    """Print the recipe's JSON Schema, for editors."""
    schema = Recipe.model_json_schema()
    options.print_json(schema) if json else typer.echo(dumps(schema, indent=2))


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help=options.RECIPE_HELP, show_default=False)
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Check this Kubeflow, too, e.g. http://localhost:8888.", show_default=False),
    ] = None,
    namespace: options.Namespace = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Check machine, store and cluster.

    Removes its test objects from the store. Exit code 1 means a problem.
    """
    with options.answer(json, trust):
        from baton import doctor as examining

        checks = examining.examine(recipe, overrides or (), store=store)
        if endpoint:
            checks += examining.examine_kubeflow(endpoint, namespace)
        examined = examining.examined(checks)
        options.print_json(examined) if json else examining.print_table(checks)
        if not examined["ok"]:
            raise typer.Exit(1)
