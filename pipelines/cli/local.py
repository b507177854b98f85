"""`baton run`: the whole pipeline on this machine."""

from __future__ import annotations

import shlex

import typer
from rich.markup import escape

from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.models import prompting
from baton.components.shared.models.prompting import Prompting
from baton.components.shared.store.storage import Storage
from baton.pipelines.api import recipes as api
from baton.pipelines.api.running import LocalRun
from baton.pipelines.cli import options
from baton.pipelines.cli.display import Display, console
from baton.pipelines.cli.options import REJECTED, Output, OutputOption, print_json, reported
from baton.pipelines.local import results


def run(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    store: options.Store = None,
    run_name: options.RunName = None,
    chunks: options.ChunkCount = None,
    runner: options.RunnerOption = options.Runner.process,
    image: options.Image = None,
    output: OutputOption = Output.text,
) -> None:
    """Runs the whole pipeline on this machine: split, tokenize, train in chunks, evaluate, export.

    Each stage is its own process or container, as each is a pod on a cluster. A run that was interrupted
    resumes where it stopped when it is given its name again with --run. The exit code is 3 where the
    recipe's gate rejects the model.
    """
    with reported(output):
        loaded = api.load(recipe, overrides or (), store=store, chunks=chunks, image=image)
        local = LocalRun.of(loaded, run_name)
        try:
            result = _shown(local, runner)
        except BatonError as error:
            if isinstance(error, UserError) or output is Output.text:
                raise
            print_json({**local.result(), "state": "failed", "error": str(error)})
            typer.secho(f"baton: {error}", err=True, fg=typer.colors.RED)
            raise typer.Exit(error.exit_code) from None
        if output is Output.json:
            print_json(result)
        else:
            _print_end(result, (local.last.get("evaluation.json") or {}).get("samples", []))
        if result["state"] == "rejected":
            raise typer.Exit(REJECTED)


def _shown(local: LocalRun, runner: options.Runner) -> results.Result:
    """Runs the pipeline, and shows how far it is."""
    console.print(f"run [bold]{local.run.name}[/] at {escape(local.run.uri)}")
    with Display(0 if local.recipe.phases else local.recipe.num_chunks) as display:
        return local.start(display.heard, containers=runner is options.Runner.docker)


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
    asks = "--chat" if _is_chat(str(result["model_uri"])) else f"--no-chat --prompt {_quoted(prompt[-80:])}"
    typer.echo(f"next:   baton generate {shlex.quote(str(result['model_uri']))} {asks}")


def _is_chat(model_uri: str) -> bool:
    """Whether an exported model was trained on conversations."""
    folder = Storage(model_uri)
    return folder.exists(prompting.FILE) and Prompting.read(folder.read(prompting.FILE), model_uri).is_chat


def _quoted(text: str) -> str:
    """Quotes text for bash and zsh, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return f"$'{''.join(escapes.get(character, character) for character in text)}'"
