"""`baton validate`, `schema`, `doctor` and `compile`: a recipe looked at before it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from baton.components.shared.recipe import Guard, Recipe
from baton.components.shared.sweeps.rungs import brackets, check_trials
from baton.pipelines.api import cluster
from baton.pipelines.cli import options
from baton.pipelines.cli.options import Output, OutputOption, print_json, reported
from baton.pipelines.cli.submit import note
from baton.pipelines.compiling import memory, prepare, profiles, rendering
from baton.pipelines.compiling.package import Pipeline


def validate(recipe: options.RecipePath, overrides: options.Overrides = None) -> None:
    """Checks a recipe: every key, every value, that the data it names exists, and that training fits the GPU."""
    with reported():
        loaded, chosen = prepare.load_explained(recipe, overrides or ())
        localised = prepare.localise(loaded, recipe)
        trials = check_trials(localised) if localised.sweep else 0
        prepare.check_model(localised)
        training = loaded.training
        length = f"{training.max_steps} steps" if training.max_steps else f"{training.epochs or 1:g} epoch(s)"
        typer.echo(
            f"{recipe} is valid: {loaded.name}, {training.method} for {length} at batch size {training.batch_size} "
            f"({loaded.split}), in {loaded.num_chunks} chunk(s)."
        )
        if trials:
            rungs = sum(len(bracket.rungs) for bracket in brackets(loaded))
            typer.echo(f"its sweep compares {trials} trials at {rungs} rung(s)")
        if guard := training.guard:
            typer.echo(_guarded(guard, by_loss=training.generation is None))
        for line in (*profiles.explained(loaded, chosen), *rendering.report(localised), *memory.report(localised)):
            typer.echo(line)
        for warning in prepare.cluster_warnings(loaded):
            typer.echo(f"on a cluster: {warning}")


def _guarded(guard: Guard, *, by_loss: bool) -> str:
    """Returns what a run's guard does, in words."""
    limits = (("loss", guard.loss if by_loss else None), ("gradient norm", guard.grad_norm))
    bounds = [f"{name} is above {times:g} times" for name, times in limits if times]
    watched = ["loss or gradient norm is not finite"] if guard.nan else []
    watched += [f"{' or '.join(bounds)} the median of the last {guard.window}"] if bounds else []
    found = f"at most {guard.max_skips} steps whose {', or whose '.join(watched)}" if watched else ""
    known = f"step {', '.join(map(str, guard.skip))}" if guard.skip else ""
    return f"its guard skips {', and '.join(part for part in (found, known) if part)}"


def schema() -> None:
    """Prints the recipe's JSON Schema, for editors that complete and check YAML."""
    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="YAML file; see docs/recipe.md.", show_default=False)
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Look at this Kubeflow Pipelines, too, e.g. http://localhost:8888.", show_default=False),
    ] = None,
    namespace: options.Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """Looks for what would be in a run's way: on this machine, in the store, on Kubeflow, and in what the recipe names.

    What it writes it removes. The exit code is 1 where there is a problem.
    """
    with reported(output):
        from baton.pipelines.local import doctor as examining

        checks = examining.examine(recipe, overrides or (), store=store)
        if endpoint:
            from baton.pipelines.kubeflow import doctor as remote

            checks += remote.examine(endpoint, namespace)
        examined = examining.examined(checks)
        print_json(examined) if output is Output.json else examining.print_table(checks)
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
        typer.Option("--graph", metavar="FILE.svg", help="Draw its graph, too, as Kubeflow's page does."),
    ] = None,
) -> None:
    """Compiles a recipe to a file for `kfp run submit -f` or the Kubeflow page."""
    with reported():
        compiled = cluster.compile(
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
        typer.echo(f"{output}: {compiled.num_chunks} chunk(s), {compiled.bytes / 1000:.0f} kB")
        typer.echo(f"workflow: {size.spec / 1000:.0f} kB, {(size.spec + size.nodes) / 1000:,.0f} kB at the end")
        if compiled.note:
            typer.echo(f"note: {compiled.note}")
        if picture:
            typer.echo(picture)
