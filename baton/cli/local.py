"""`baton run` and `baton retrain`: the pipeline and retraining on this machine."""

import os
import shlex

import typer
from rich.markup import escape

from baton import api, events
from baton.cli import options
from baton.cli.display import Display, console
from baton.cli.kubeflow import RETRAINED, links
from baton.compiler.pipeline_file import Pipeline
from baton.errors import BatonError, UserError
from baton.local import results
from baton.models import prompts
from baton.source import prepare
from baton.store.storage import Storage


def run(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    store: options.Store = None,
    run_name: options.RunName = None,
    chunks: options.ChunkCount = None,
    runner: options.RunnerOption = options.Runner.process,
    image: options.Image = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Runs the whole pipeline on this machine: split, tokenize, train in chunks, evaluate, export.

    Each stage is its own process or container, as each is a pod on a cluster. A run that was interrupted
    resumes where it stopped when it is given its name again with --run. The exit code is 3 where the
    recipe's gate rejects the model.
    """
    with options.answer(json, trust):
        loaded = api.load(recipe, overrides or (), store=store, chunks=chunks, image=image)
        local = api.LocalRun.of(loaded, run_name)
        try:
            console.print(f"run [bold]{local.run.name}[/] at {escape(local.run.uri)}")
            with Display(0 if local.recipe.phases else local.recipe.num_chunks) as display:
                result = local.start(display.heard, containers=runner is options.Runner.docker)
        except BatonError as error:
            if isinstance(error, UserError) or not json:
                raise
            options.print_json({**local.result(), "state": "failed", "error": str(error)})
            typer.secho(f"baton: {error}", err=True, fg=typer.colors.RED)
            raise typer.Exit(error.exit_code) from None
        if json:
            options.print_json(result)
        else:
            _print_end(result, (local.last.raw("evaluation.json") or {}).get("samples", []))
        if result["state"] == "rejected":
            raise typer.Exit(options.REJECTED)


def _print_end(result: results.Result, samples: list[dict[str, str]]) -> None:
    prompt = samples[0]["prompt"] if samples else "The"
    typer.echo(f"report: {result['report_uri']}")
    if result["state"] == "rejected":
        for line in result["gate"]:
            typer.secho(f"gate:   {line['words']}", fg=None if line["held"] else typer.colors.RED)
        typer.secho("The run is rejected and nothing is exported.", fg=typer.colors.RED)
        return
    typer.echo(f"model:  {result['model_uri']}")
    for entry in result["exports"][1:]:
        typer.echo(f"{str(entry['format']) + ':':7} {entry['uri']}")
    uri = str(result["model_uri"])
    folder = Storage(uri)
    is_chat = folder.exists(prompts.FILE) and prompts.PromptFormat.read(folder.read(prompts.FILE), uri).is_chat
    asks = "--chat" if is_chat else f"--no-chat --prompt {_quoted(prompt[-80:])}"
    typer.echo(f"next:   baton generate {shlex.quote(uri)} {asks}")


def _quoted(text: str) -> str:
    """Quotes text for bash and zsh, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return f"$'{''.join(escapes.get(character, character) for character in text)}'"


def retrain(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    runner: options.RunnerOption = options.Runner.process,
    image: options.Image = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Trains a model again if its data or its recipe have changed since one was accepted, and promotes what passes.

    The new model is judged by the recipe's gate, as a rule against the one in use (evaluation.production: accepted).
    One retraining of a model runs at a time; one that was interrupted resumes where it stopped. The exit code is 3
    where the gate rejects the model.
    """
    with options.answer(json, trust):
        from baton.local import engine
        from baton.retrain import PROCESS, this_process

        outcomes: list[events.Retraining] = []

        def heard(event: events.Event) -> None:
            match event:
                case events.Retraining():
                    outcomes.append(event)
                case events.Looked(decision="train"):
                    console.print(f"run [bold]{event.run}[/]: {escape(event.words)}")
                case events.Queued():
                    console.print(f"[yellow]waits for the retraining under way since {event.since}[/]")
            display.heard(event)

        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks, image=image).localised()
        prepare.check_store(loaded)
        os.environ[PROCESS] = this_process()
        with Display(0 if loaded.phases else loaded.num_chunks) as display:
            engine.run_recipe(
                loaded,
                f"{loaded.name}-retrain",
                pipeline=Pipeline.retrain,
                arguments={},
                on_event=heard,
                containers=runner is options.Runner.docker,
            )
        outcome = outcomes[-1]
        if json:
            options.print_json({name: value for name, value in outcome.fields().items() if name != "at"})
        else:
            typer.echo(f"{loaded.name}: {RETRAINED[outcome.state]} ({outcome.words})")
            for name, uri in links(outcome):
                typer.echo(f"{name + ':':8}{uri}")
        if outcome.state == "rejected":
            raise typer.Exit(options.REJECTED)
