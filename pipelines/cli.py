"""The `baton` command."""

from __future__ import annotations

import json
import os
import shlex
from typing import Annotated, Any

import typer

from components.shared.errors import BatonError, UserError
from components.shared.recipe import Recipe
from components.shared.rungs import brackets, check_trials
from components.shared.runs import Run, check_name
from pipelines import (
    checkpoint_commands,
    data_command,
    drill_command,
    memory,
    prepare,
    profiles,
    results,
    retrain_command,
    run_commands,
    runs_commands,
    schedule_command,
    sweep_command,
    use_commands,
)
from pipelines.display import Display, console
from pipelines.importing import command as import_command
from pipelines.options import (
    REJECTED,
    ChunkCount,
    Control,
    Image,
    Output,
    OutputOption,
    Overrides,
    PipelineOption,
    RecipePath,
    RunName,
    Runner,
    RunnerOption,
    Store,
    print_json,
    reported,
)
from pipelines.package import Pipeline, write_package

app = typer.Typer(
    name="baton",
    help="Train language models in chunks that hand on to each other without losing a bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(checkpoint_commands.app, name="checkpoints")
app.add_typer(data_command.app, name="data")
app.add_typer(import_command.app, name="import")
app.add_typer(runs_commands.app, name="runs")
app.add_typer(schedule_command.app, name="schedules")
app.add_typer(sweep_command.app, name="sweep")


@app.command()
def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check a recipe: every key, every value, that the data it names exists, and that training fits the GPU."""
    with reported():
        loaded, chosen = prepare.load_explained(recipe, overrides or ())
        localised = prepare.localise(loaded, recipe)
        trials = check_trials(localised) if localised.sweep else 0
        prepare.check_model(localised)
        training = loaded.training
        length = f"{training.max_steps} steps" if training.max_steps else f"{training.epochs or 1:g} epoch(s)"
        typer.echo(
            f"{recipe} is valid: {loaded.name}, {training.method} for {length} at batch size {training.batch_size} "
            f"({loaded.split}), in {loaded.chunks.count} chunk(s)."
        )
        if trials:
            rungs = sum(len(bracket.rungs) for bracket in brackets(loaded))
            typer.echo(f"its sweep compares {trials} trials at {rungs} rung(s)")
        for line in (*profiles.explained(loaded, chosen), *memory.report(localised)):
            typer.echo(line)
        for warning in prepare.cluster_warnings(loaded):
            typer.echo(f"on a cluster: {warning}")


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema, for editors that complete and check YAML."""
    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="YAML file; see docs/recipe.md.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    store: Store = None,
    output: OutputOption = Output.text,
) -> None:
    """Look for what would be in a run's way: on this machine, in the store, and in what the recipe names.

    What it writes it removes. The exit code is 1 where there is a problem.
    """
    with reported(output):
        from pipelines import doctor as examining

        found = examining.examine(recipe, overrides or (), store=store)
        print_json(found) if output is Output.json else examining.print_table(found)
        if not found["ok"]:
            raise typer.Exit(1)


@app.command("compile")
def compile_command(
    recipe: RecipePath,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE.yaml", help="Where to write it.")],
    overrides: Overrides = None,
    store: Store = None,
    chunks: ChunkCount = None,
    image: Image = None,
    pipeline: PipelineOption = Pipeline.finetune,
) -> None:
    """Compile a recipe to a file for `kfp run submit -f` or the Kubeflow page."""
    with reported():
        loaded = prepare.load(recipe, overrides or (), store=store, chunks=chunks, image=image, here=False)
        run_commands.warn_about_cluster(loaded)
        write_package(prepare.for_cluster(loaded), output, pipeline)
        typer.echo(f"{output}: {loaded.chunks.count} chunk(s), {os.path.getsize(output) / 1000:.0f} kB")


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    store: Store = None,
    run_name: RunName = None,
    chunks: ChunkCount = None,
    runner: RunnerOption = Runner.process,
    image: Image = None,
    output: OutputOption = Output.text,
) -> None:
    """Run the whole pipeline on this machine: split, tokenize, train in chunks, evaluate, export.

    Each stage is a process or a container of its own, as each is a pod on a cluster. A run that was interrupted
    goes on where it stopped when it is given its name again with --run. The exit code is 3 where the
    recipe's gate rejects the model.
    """
    with reported(output):
        given = prepare.load(recipe, overrides or (), store=store, chunks=chunks, image=image)
        loaded = prepare.localise(given, recipe)
        name = check_name(run_name or prepare.new_run_name(loaded))
        training_run = Run(prepare.check_store(loaded), prepare.last_run_name(loaded, name))
        if not loaded.phases:
            training_run.require_same(loaded)
        try:
            _run_pipeline(loaded, Run(training_run.storage, name), runner)
        except BatonError as error:
            if isinstance(error, UserError) or output is Output.text:
                raise
            print_json({**results.result(training_run), "state": "failed", "error": str(error)})
            typer.secho(f"baton: {error}", err=True, fg=typer.colors.RED)
            raise typer.Exit(error.exit_code) from None
        found = results.result(training_run)
        if output is Output.json:
            print_json(found)
        else:
            _print_end(found, (training_run.get("evaluation.json") or {}).get("samples", []))
        if found["state"] == "rejected":
            raise typer.Exit(REJECTED)


def _run_pipeline(recipe: Recipe, training_run: Run, runner: Runner) -> None:
    from pipelines import local

    console.print(f"run [bold]{training_run.name}[/] at {training_run.uri}")
    with Display(0 if recipe.phases else recipe.chunks.count) as display:
        local.run_recipe(
            recipe,
            training_run.name,
            arguments={"run_name": training_run.name},
            on_event=display.heard,
            containers=runner is Runner.docker,
        )


def _print_end(found: dict[str, Any], samples: list[dict[str, str]]) -> None:
    prompt = samples[0]["prompt"] if samples else "The"
    typer.echo(f"report: {found['report_uri']}")
    if found["state"] == "rejected":
        for line in found["gate"]:
            typer.secho(f"gate:   {line['words']}", fg=None if line["held"] else typer.colors.RED)
        typer.secho("The run is rejected and nothing is exported.", fg=typer.colors.RED)
        return
    typer.echo(f"model:  {found['model_uri']}")
    for entry in found["exports"][1:]:
        typer.echo(f"{entry['format'] + ':':7} {entry['uri']}")
    typer.echo(f"next:   baton generate {found['model_uri']} --prompt {_quoted(prompt[-80:])}")


def _quoted(text: str) -> str:
    """Quotes text for bash and zsh, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return f"$'{''.join(escapes.get(character, character) for character in text)}'"


@app.command()
def prove(
    recipe: RecipePath,
    chunks: Annotated[str, typer.Option(help="Numbers of chunks to compare, by commas.")] = "1,2,5",
    leave_out: Annotated[
        list[Control] | None, typer.Option(help="Do not restore this part of the state: a negative control.")
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Page to write; prove-<recipe's name>.html when left out.")
    ] = None,
    overrides: Overrides = None,
    store: Store = None,
    output: OutputOption = Output.text,
) -> None:
    """Run a recipe once per number of chunks, in fresh processes, and compare losses and state byte for byte.

    The page that it writes shows the curves over each other and what differs, if anything does.
    """
    with reported(output):
        from pipelines import prove as proving
        from pipelines import prove_page, warm

        counts = proving.parse_counts(chunks)
        loaded = prepare.localise(prepare.load(recipe, overrides or (), store=store), recipe)
        page = prove_page.check_path(report or f"prove-{loaded.name}.html")
        prepare.require_single(loaded, "prove")
        prepare.check_store(loaded)
        warm.start()
        prepare.check_model(loaded)
        with Display(max(counts)) as display:
            name = f"prove-{prepare.new_run_name(loaded)}"
            found = proving.prove(loaded, counts, name=name, leave_out=leave_out or (), on_event=display.heard)
        found["report"] = page
        prove_page.write(found, page)
        print_json(found) if output is Output.json else proving.print_table(found)
        if not found["exact"]:
            raise typer.Exit(1)


app.command()(run_commands.submit)
app.command()(run_commands.status)
app.command()(run_commands.cancel)
app.command()(run_commands.retry)
app.command()(drill_command.drill)
app.command()(use_commands.generate)
app.command()(use_commands.serve)
app.command()(retrain_command.retrain)
app.command()(retrain_command.outcome)
app.command()(schedule_command.schedule)


def main() -> None:
    """Entry point of the console script."""
    app()
