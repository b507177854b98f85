"""`baton recipes`, `validate`, `schema`, `doctor` and `compile`: look at a recipe before it runs."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer

from baton import api
from baton.cli import options
from baton.cli.display import note, screen
from baton.cli.options import answer, print_json
from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline
from baton.recipe.recipe import Recipe
from baton.recipe.training import Guard
from baton.source import memory, origin, prepare, profiles
from baton.sweep.search import brackets, check_trials

app = typer.Typer(help="Lists the recipes that Baton brings along, and prints one.")


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context, json: options.Json = False) -> None:
    """Lists the recipes that Baton brings along, which every command takes by their names; `show` prints one."""
    if context.invoked_subcommand is None:
        list_recipes(json)


@app.command("list")
def list_recipes(json: options.Json = False) -> None:
    """Lists the recipes that Baton brings along, which every command takes by their names."""
    with answer(json):
        listed = [origin.described(name) for name in origin.bundled()]
        if json:
            print_json({"recipes": listed})
            return
        from rich import box
        from rich.table import Table

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
    with answer(json):
        found = origin.of_bundle(name)
        if json:
            print_json({**origin.described(name), "yaml": found.standalone()})
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
    with answer(json, trust):
        from baton.local import preview

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
            "profile": list(profiles.explained(loaded, found.choices)),
            "rendering": list(prepare.rendering_report(localised)),
            "memory": list(memory.report(localised)),
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
            print_json({"state": "valid", "recipe": source.name, **extent, **reports})
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
    print_json(schema) if json else typer.echo(dumps(schema, indent=2))


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
    with answer(json, trust):
        from baton import doctor as examining

        checks = examining.examine(recipe, overrides or (), store=store)
        if endpoint:
            checks += examining.examine_kubeflow(endpoint, namespace)
        examined = examining.examined(checks)
        print_json(examined) if json else examining.print_table(checks)
        if not examined["ok"]:
            raise typer.Exit(1)


def compile_recipe(
    recipe: options.RecipePath,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE.yaml", help="Where to write it.")],
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    image: options.Image = None,
    pipeline: options.PipelineOption = Pipeline.finetune,
    picture: Annotated[
        str | None,
        typer.Option("--graph", metavar="FILE.mmd", help="Write its graph, too, as Mermaid text."),
    ] = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Compiles a recipe to a file for `kfp run submit -f` or the Kubeflow page."""
    with answer(json, trust):
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
            print_json({"state": "compiled", **about, **figures})
            return
        typer.echo(f"{output}: {compiled.num_chunks} chunk(s), {compiled.bytes / 1000:.0f} kB")
        typer.echo(f"workflow: {size.spec / 1000:.0f} kB, {(size.spec + size.nodes) / 1000:,.0f} kB at the end")
        if compiled.note:
            typer.echo(f"note: {compiled.note}")
        if picture:
            typer.echo(picture)
