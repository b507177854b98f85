"""`baton init` and `import` make a recipe; `recipes`, `validate`, `schema`, `doctor` and `compile` look at one."""

import os
import re
import shlex
import sys
from json import dumps
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from baton import api
from baton.cli import options
from baton.cli.display import Display, note, screen
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

import_app = typer.Typer(
    help="Turn another trainer's file into a recipe, and list what it could not carry over.", no_args_is_help=True
)

SUGGESTED = "Qwen/Qwen3-0.6B"  # proposed where a person is asked
TheirFile = Annotated[str, typer.Argument(metavar="FILE.yaml", help="Training file to read.", show_default=False)]
Target = Annotated[
    str | None,
    typer.Option("-o", "--output", metavar="RECIPE.yaml", help="Where to write the recipe; printed when left out."),
]


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
    output: Target = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of a LoRA adapter.")] = False,
    teacher: Annotated[str | None, typer.Option(help=f"With {' and '.join(TAUGHT)}: the model to learn from.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    json: options.Json = False,
) -> None:
    """Writes a first recipe for rows that it has looked at: a method they serve, and values with the reasons for them.

    Nothing is fetched from the hub. On a terminal it asks for what is left out.
    """
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
        typer.echo(f"wrote {target}; next: baton validate {shlex.quote(target)}", err=True)


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
        raise BatonError(f"what was chosen makes no recipe: {error}") from error


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@import_app.command("llamafactory")
def import_llamafactory(file: TheirFile, output: Target = None, json: options.Json = False) -> None:
    """Makes a recipe from a LLaMA-Factory training file.

    Data sets are looked up in dataset_info.json: in dataset_dir, or beside the file.
    """
    from baton.importers import llamafactory  # whose tables take a while to read

    _import(llamafactory.TRAINER, file, output, json)


@import_app.command("axolotl")
def import_axolotl(file: TheirFile, output: Target = None, json: options.Json = False) -> None:
    """Makes a recipe from an axolotl training file."""
    from baton.importers import axolotl

    _import(axolotl.TRAINER, file, output, json)


def _import(trainer: drafts.OtherTrainer, file: str, output: str | None, json: bool) -> None:
    with options.answer(json):
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
            typer.echo(f"next: baton validate {shlex.quote(output)}")


app = typer.Typer(help="Lists the recipes that Baton brings along, and prints one.")


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context, json: options.Json = False) -> None:
    """Lists the recipes that Baton brings along, which every command takes by their names; `show` prints one."""
    if context.invoked_subcommand is None:
        list_recipes(json)


@app.command("list")
def list_recipes(json: options.Json = False) -> None:
    """Lists the recipes that Baton brings along, which every command takes by their names."""
    with options.answer(json):
        listed = [origin.described(name) for name in origin.bundled()]
        if json:
            options.print_json({"recipes": listed})
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("name", "method", "model", "about"):
            table.add_column(heading, overflow="fold", no_wrap=heading in ("name", "method"))
        for row in listed:
            table.add_row(row["name"], row["method"], row["model"], row["about"])
        screen().print(table)
        typer.echo("baton run NAME runs one, baton recipes show NAME > my.yaml makes it yours")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a bundled recipe.", show_default=False)],
    json: options.Json = False,
) -> None:
    """Prints a recipe that Baton brings along, for a file of your own."""
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
    """Checks a recipe: every key, every value, that the data it names exists and suits the method, and fits the GPU.

    Of rows on this machine the first ones are looked at; `baton data check` looks at all of them.
    """
    with options.answer(json, trust):
        found = prepare.load(recipe, overrides)
        source, loaded, localised = found.origin, found.recipe, found.localised()
        training, sweep = loaded.training, []
        if localised.sweep:
            rungs = sum(len(bracket.rungs) for bracket in brackets(loaded))
            sweep = [f"its sweep compares {check_trials(localised)} trials at {rungs} rung(s)"]
        seen = list(preview.describe_rows(localised))
        prepare.check_model(localised)
        reports = {
            "rows": seen,
            "sweep": sweep,
            "guard": [_guarded(training.guard, by_loss=training.generation is None)] if training.guard else [],
            "profile": list(hardware.explain_profile(loaded, found.choices)),
            "rendering": list(prepare.rendering_report(localised)),
            "memory": list(hardware.memory_report(localised)),
            "on_a_cluster": pipeline_file.cluster_warnings(loaded),
        }
        if json:
            extent = {
                "name": loaded.name,
                "method": training.method,
                "phases": [{"name": phase.name, "method": phase.training.method} for phase in loaded.phase_recipes()],
                "epochs": None if training.max_steps else training.epochs or 1.0,
                "max_steps": training.max_steps,
                "batch_size": training.batch_size,
                "chunks": loaded.num_chunks,
            }
            options.print_json({"state": "valid", "recipe": source.name, **extent, **reports})
            return
        length = f"{training.max_steps} steps" if training.max_steps else f"{training.epochs or 1:g} epoch(s)"
        typer.echo(
            f"{source.name} is valid: {loaded.name}, {training.method} for {length} at batch size "
            f"{training.batch_size} ({loaded.split}), in {loaded.num_chunks} chunk(s)."
        )
        for about in ("sweep", "guard", "rows", "profile", "rendering", "memory"):
            for line in reports[about]:
                typer.echo(line)
        for warning in reports["on_a_cluster"]:
            typer.echo(f"on a cluster: {warning}")


def _guarded(guard: Guard, *, by_loss: bool) -> str:
    limits = (("loss", guard.loss if by_loss else None), ("gradient norm", guard.grad_norm))
    bounds = [f"{name} is above {times:g} times" for name, times in limits if times]
    watched = ["loss or gradient norm is not finite"] if guard.nan else []
    watched += [f"{' or '.join(bounds)} the median of the last {guard.window}"] if bounds else []
    found = f"at most {guard.max_skips} steps whose {', or whose '.join(watched)}" if watched else ""
    known = f"step {', '.join(map(str, guard.skip))}" if guard.skip else ""
    return f"its guard skips {', and '.join(part for part in (found, known) if part)}"


def schema(json: options.Json = False) -> None:
    """Prints the recipe's JSON Schema, for editors that complete and check YAML."""
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
        typer.Option(help="Look at this Kubeflow Pipelines, too, e.g. http://localhost:8888.", show_default=False),
    ] = None,
    namespace: options.Namespace = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Looks for what would be in a run's way: on this machine, in the store, on Kubeflow, and in what the recipe names.

    What it writes it removes. The exit code is 1 where there is a problem.
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


def compile_recipe(
    recipe: options.RecipePath,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE.yaml", help="Where to write it.")],
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    image: options.Image = None,
    pipeline: options.PipelineOption = pipeline_file.Pipeline.finetune,
    picture: Annotated[
        str | None,
        typer.Option("--graph", metavar="FILE.mmd", help="Write its graph, too, as Mermaid text."),
    ] = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Compiles a recipe to a file for `kfp run submit -f` or the Kubeflow page."""
    with options.answer(json, trust):
        compiled = api.compile(
            recipe,
            output,
            overrides=overrides or (),
            store=store,
            chunks=chunks,
            image=image,
            pipeline=pipeline,
            picture=picture,
            tell=note,
        )
        size = compiled.workflow
        if json:
            at_end = size.spec + size.nodes
            figures = {"bytes": compiled.bytes, "workflow_bytes": size.spec, "workflow_bytes_at_end": at_end}
            about = {"package": output, "chunks": compiled.num_chunks, "note": compiled.note, "graph": picture}
            options.print_json({"state": "compiled", **about, **figures})
            return
        typer.echo(f"{output}: {compiled.num_chunks} chunk(s), {compiled.bytes / 1000:.0f} kB")
        typer.echo(f"workflow: {size.spec / 1000:.0f} kB, {(size.spec + size.nodes) / 1000:,.0f} kB at the end")
        if compiled.note:
            typer.echo(f"note: {compiled.note}")
        if picture:
            typer.echo(picture)
