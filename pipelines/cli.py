"""The `baton` command."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from components.shared.errors import BatonError, UserError
from components.shared.recipe import Recipe
from components.shared.runs import Run
from pipelines import prepare, results
from pipelines.display import Display, console

app = typer.Typer(
    name="baton",
    help="Train language models in chunks that hand on to each other without losing a bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
checkpoints_app = typer.Typer(help="Look at the checkpoints of a run, and check every byte.", no_args_is_help=True)
app.add_typer(checkpoints_app, name="checkpoints")


class Output(StrEnum):
    """How a command answers."""

    text = "text"
    json = "json"


RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file; see docs/recipe.md.", show_default=False)]
RunUri = Annotated[str, typer.Argument(metavar="RUN_URI", help="STORE/runs/NAME, as `baton run` prints it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value, e.g. training.learning_rate=1e-4. Repeatable."),
]
Store = Annotated[str | None, typer.Option(help="Folder or s3://bucket[/prefix] instead of the recipe's store.")]
RunName = Annotated[
    str | None, typer.Option("--run", help="Name of the run; one that exists goes on where it stopped.")
]
ChunkCount = Annotated[int | None, typer.Option(help="Number of chunks instead of the recipe's.")]
OutputOption = Annotated[Output, typer.Option("--output", help="json prints one object on standard output.")]


@contextlib.contextmanager
def _reported(output: Output = Output.text) -> Iterator[None]:
    """Turns a known error into one message and its exit code."""
    try:
        yield
    except BatonError as error:
        if output is Output.json:
            _print_json({"state": "failed", "error": str(error), "exit_code": error.exit_code})
        typer.secho(f"baton: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.secho("baton: interrupted; the same command with --run NAME goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")


@app.command()
def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check a recipe: every key, every value, and that the data it names exists."""
    with _reported():
        loaded = prepare.load(recipe, overrides or ())
        prepare.localise(loaded, recipe)
        training = loaded.training
        length = f"{training.max_steps} steps" if training.max_steps else f"{training.epochs or 1:g} epoch(s)"
        typer.echo(
            f"{recipe} is valid: {loaded.name}, {training.method} for {length} at batch size {training.batch_size} "
            f"({training.accumulation} x {training.micro}), in {loaded.chunks.count} chunk(s)."
        )
        for warning in prepare.cluster_warnings(loaded):
            typer.echo(f"on a cluster: {warning}")


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema, for editors that complete and check YAML."""
    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


@app.command("compile")
def compile_command(
    recipe: RecipePath,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE.yaml", help="Where to write it.")],
    overrides: Overrides = None,
    store: Store = None,
    chunks: ChunkCount = None,
) -> None:
    """Compile a recipe to a file for `kfp run submit -f` or the Kubeflow page."""
    with _reported():
        loaded = prepare.load(recipe, overrides or (), store=store, chunks=chunks)
        _warn_about_cluster(loaded)
        _compile(prepare.for_cluster(loaded), output)
        typer.echo(f"{output}: {loaded.chunks.count} chunk(s), {os.path.getsize(output) / 1000:.0f} kB")


def _compile(recipe: Recipe, path: str) -> None:
    """Compiles and checks the result as a cluster would."""
    from kfp import compiler

    from pipelines import conformance
    from pipelines.finetune import finetune

    if not path.endswith((".yaml", ".yml")):
        raise UserError(f"output {path!r} has another ending than .yaml.", remedy="Kubeflow takes YAML files.")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    compiler.Compiler().compile(finetune(recipe), path)
    if problems := conformance.check(path):
        raise BatonError(f"the compiled file does not conform: {'; '.join(problems)}")


def _warn_about_cluster(recipe: Recipe) -> None:
    for warning in prepare.cluster_warnings(recipe):
        console.print(f"[yellow]note:[/] {warning}")


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    store: Store = None,
    run_name: RunName = None,
    chunks: ChunkCount = None,
    output: OutputOption = Output.text,
) -> None:
    """Run the whole pipeline on this machine: split, tokenize, train in chunks, evaluate, export.

    Each stage is a process of its own, as each is a pod on a cluster. A run that was interrupted
    goes on where it stopped when it is given its name again with --run.
    """
    with _reported(output):
        loaded = prepare.localise(prepare.load(recipe, overrides or (), store=store, chunks=chunks), recipe)
        training_run = Run(
            prepare.check_store(loaded), prepare.check_run_name(run_name or prepare.new_run_name(loaded))
        )
        training_run.require_same(loaded)
        try:
            _run_pipeline(loaded, training_run)
        except BatonError as error:
            if isinstance(error, UserError) or output is Output.text:
                raise
            _print_json({**results.result(training_run), "state": "failed", "error": str(error)})
            typer.secho(f"baton: {error}", err=True, fg=typer.colors.RED)
            raise typer.Exit(error.exit_code) from None
        found = results.result(training_run)
        if output is Output.json:
            _print_json(found)
        else:
            _print_end(found)


def _run_pipeline(recipe: Recipe, training_run: Run) -> None:
    from components.shared.models import cache_dir
    from pipelines import local

    console.print(f"run [bold]{training_run.name}[/] at {training_run.uri}")
    log_path = os.path.join(cache_dir(), "logs", f"{training_run.name}.log")
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="baton-compile-") as folder,
        Display(recipe.chunks.count) as display,
    ):
        package = os.path.join(folder, "pipeline.yaml")
        _compile(recipe, package)
        local.run(package, {"run_name": training_run.name}, on_event=display.heard, log_path=log_path)


def _print_end(found: dict[str, Any]) -> None:
    prompt = shlex.quote("def count(text, word):\n")
    typer.echo(f"report: {found['report_uri']}")
    typer.echo(f"model:  {found['model_uri']}")
    typer.echo(f"next:   baton generate {found['model_uri']} --prompt {prompt}")


@app.command()
def submit(
    recipe: RecipePath,
    endpoint: Annotated[str, typer.Option(help="Kubeflow Pipelines API, e.g. http://localhost:8888.")],
    experiment: Annotated[str | None, typer.Option(help="Experiment; the recipe's name when left out.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run; the exit code is its state.")] = False,
    timeout: Annotated[float, typer.Option(help="Hours to wait at most.")] = 168.0,
    namespace: Annotated[str | None, typer.Option(help="Kubeflow profile, where there are several.")] = None,
    overrides: Overrides = None,
    store: Store = None,
    run_name: RunName = None,
    chunks: ChunkCount = None,
    output: OutputOption = Output.text,
) -> None:
    """Upload a recipe's pipeline to Kubeflow, start a run and print its page.

    A bearer token is read from BATON_KFP_TOKEN or KF_PIPELINES_TOKEN.
    """
    with _reported(output):
        from pipelines import submit as kubeflow

        loaded = prepare.load(recipe, overrides or (), store=store, chunks=chunks)
        _warn_about_cluster(loaded)
        name = prepare.check_run_name(run_name or prepare.new_run_name(loaded))
        token = os.environ.get("BATON_KFP_TOKEN") or os.environ.get("KF_PIPELINES_TOKEN")
        with tempfile.TemporaryDirectory(prefix="baton-compile-") as folder:
            package = os.path.join(folder, f"{loaded.name}.yaml")
            _compile(prepare.for_cluster(loaded), package)
            submission = kubeflow.submit(
                package,
                endpoint,
                experiment=experiment or loaded.name,
                run_name=name,
                arguments={"run_name": name},
                token=token,
                namespace=namespace,
            )
        console.print(f"started [bold]{name}[/]: {submission.url}")
        state = "submitted"
        if wait:
            state = kubeflow.wait(
                endpoint,
                submission.run_id,
                timeout_s=timeout * 3600,
                on_state=lambda run, now: console.print(f"{run}: {now}"),
                token=token,
                namespace=namespace,
            ).lower()
        found = {"run": name, "run_id": submission.run_id, "url": submission.url, "state": state}
        _print_json(found) if output is Output.json else typer.echo(submission.url)
        if wait and state != "succeeded":
            raise typer.Exit(1)


@checkpoints_app.command("list")
def list_checkpoints(run_uri: RunUri, output: OutputOption = Output.text) -> None:
    """List the committed checkpoints of a run."""
    with _reported(output):
        rows = results.list_checkpoints(_existing(run_uri))
        _answer(output, rows, lambda row: f"{row['digest'][:16]}  {row['bytes'] / 1e6:8.1f} MB  {row['uri']}")


@checkpoints_app.command("show")
def show_checkpoint(
    run_uri: RunUri,
    step: Annotated[int | None, typer.Option(help="Step; the newest when left out.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Show all that a checkpoint's manifest says."""
    with _reported(output):
        from dataclasses import asdict

        from components.shared.checkpoint_store import CheckpointStore

        store = CheckpointStore(_existing(run_uri))
        wanted = step if step is not None else max(store.steps(), default=0)
        manifest = store.manifest(wanted)
        if manifest is None:
            raise UserError(f"run {run_uri!r} has no checkpoint of step {wanted}; it has {store.steps()}.")
        document = {"step": wanted, "uri": store.uri(wanted, manifest), **asdict(manifest)}
        _print_json(document) if output is Output.json else typer.echo(json.dumps(document, indent=2))


@checkpoints_app.command("verify")
def verify_checkpoints(run_uri: RunUri, output: OutputOption = Output.text) -> None:
    """Read every checkpoint back, compare all hashes, and check that they continue each other."""
    with _reported(output):
        rows = results.verify_checkpoints(_existing(run_uri))
        _answer(output, rows, lambda row: "whole" if row["ok"] else f"DAMAGED: {'; '.join(row['problems'])}")
        if not all(row["ok"] for row in rows):
            raise typer.Exit(1)


def _existing(run_uri: str) -> Run:
    found = Run.open(run_uri)
    found.require("recipe.json")
    return found


def _answer(output: Output, rows: list[dict[str, Any]], line: Callable[[dict[str, Any]], str]) -> None:
    if output is Output.json:
        _print_json({"checkpoints": rows})
        return
    for row in rows:
        typer.echo(f"step {row['step']:>8}  {row['problem'] if 'problem' in row else line(row)}")


@app.command()
def generate(
    model_uri: Annotated[str, typer.Argument(metavar="MODEL_URI", help="Exported model, checkpoint or hub id.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation in tokens.")] = 64,
) -> None:
    """Write text with a model, greedily."""
    with _reported():
        from components.shared import events, generation

        events.setup_logging()
        model, tokenizer = generation.load(model_uri)
        limit = int(getattr(model.config, "max_position_embeddings", 2048))
        typer.echo(generation.write(model, tokenizer, prompt, max_new_tokens=max_new_tokens, max_length=limit))


@app.command()
def prove(
    recipe: RecipePath,
    chunks: Annotated[str, typer.Option(help="Numbers of chunks to compare, by commas.")] = "1,2,5",
    leave_out: Annotated[
        list[str] | None,
        typer.Option(help="Do not restore this part of the state, e.g. rng: a negative control."),
    ] = None,
    overrides: Overrides = None,
    store: Store = None,
    output: OutputOption = Output.text,
) -> None:
    """Run a recipe once per number of chunks, in fresh processes, and compare losses and state byte for byte."""
    with _reported(output):
        from pipelines import prove as proving

        counts = proving.parse_counts(chunks)
        loaded = prepare.localise(prepare.load(recipe, overrides or (), store=store), recipe)
        prepare.check_store(loaded)
        with Display(max(counts)) as display:
            name = f"prove-{prepare.new_run_name(loaded)}"
            found = proving.prove(loaded, counts, name=name, leave_out=leave_out or (), on_event=display.heard)
        _print_json(found) if output is Output.json else proving.print_table(found)
        if not found["exact"]:
            raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    app()
