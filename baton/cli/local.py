"""`baton run`, `baton retrain` and `baton outcome`: the pipeline and retraining on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.markup import escape

from baton import api, events
from baton.api import LocalRun
from baton.cli import kubeflow, options
from baton.cli.display import Display, console
from baton.cli.kubeflow import Shown
from baton.cli.options import REJECTED, Output, OutputOption, print_json, reported
from baton.compiler.pipeline_file import Pipeline
from baton.documents import load
from baton.errors import BatonError, DamagedError, UserError
from baton.events import Retraining
from baton.local import results
from baton.models import prompts
from baton.models.prompts import PromptFormat
from baton.recipe import load as recipe_file
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import EvaluationResult, ExportedModel, ReportPage
from baton.runs.run import Run, now
from baton.source import origin, prepare
from baton.store.storage import Storage

# --- `baton run`: the whole pipeline on this machine.


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
            _print_end(result, (local.last.raw("evaluation.json") or {}).get("samples", []))
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
    return folder.exists(prompts.FILE) and PromptFormat.read(folder.read(prompts.FILE), model_uri).is_chat


def _quoted(text: str) -> str:
    """Quotes text for bash and zsh, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return f"$'{''.join(escapes.get(character, character) for character in text)}'"


# --- `baton retrain` and `baton outcome`: retraining on this machine, and what a retraining came to.


SAID = {
    "unchanged": "nothing to do",
    "busy": "dropped",
    "promoted": "promoted",
    "rejected": "rejected, the model in use stays",
    "failed": "failed, the model in use stays",
}
"""State of a retraining → in words."""
ENDED = {
    "succeeded": "succeeded",
    "rejected": "rejected by its gate",
    "failed": "failed",
    "canceled": "cancelled",
    kubeflow.UNKNOWN: "not followed to its end, the run may go on",
}
"""State of any other run → in words."""


def retrain(
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    runner: options.RunnerOption = options.Runner.process,
    image: options.Image = None,
    output: OutputOption = Output.text,
) -> None:
    """Trains a model again if its data or its recipe have changed since one was accepted, and promotes what passes.

    The new model is judged by the recipe's gate, as a rule against the one in use (evaluation.production: accepted).
    One retraining of a model runs at a time; one that was interrupted resumes where it stopped. The exit code is 3
    where the gate rejects the model.
    """
    with reported(output):
        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks, image=image).localised()
        prepare.check_store(loaded)
        outcome = _run(loaded, runner)
        document = {name: value for name, value in outcome.fields().items() if name != "at"}
        print_json(document) if output is Output.json else typer.echo(_in_words(loaded.name, outcome))
        if outcome.state == "rejected":
            raise typer.Exit(REJECTED)


def outcome(
    recipe: options.RecipePath,
    run_id: Annotated[
        str | None, typer.Option("--id", help="Id of the Kubeflow run, as `baton submit` prints it.")
    ] = None,
    result: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Instead of --id: what `baton submit --wait --output json` has printed."),
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    output: OutputOption = Output.text,
) -> None:
    """Tells what a run on a cluster came to, as Markdown for a comment: by its id a retraining, else any.

    The exit code is 0 where it was promoted, has succeeded or had nothing to do, 3 where the gate
    rejected the model, and else that of what failed.
    """
    with reported(output):
        changes = [*(overrides or ()), *([f"store.uri={json.dumps(store)}"] if store else [])]
        source = origin.find(recipe)
        loaded = recipe_file.validate(source.document(changes), origin=source.name)
        storage = Storage(loaded.store.uri)
        if (run_id is None) == (result is None):
            raise UserError("expected one of --id and --result.")
        told = _told(result) if result is not None else Shown(run_id=run_id or "")
        try:
            came_to = _kept(storage, loaded.name, told["run_id"])
            heading = f"Retraining of {loaded.name}: {SAID.get(came_to.state, came_to.state)}"
        except (BatonError, KeyError):
            if result is None:
                raise
            if told["state"] == "failed" and "run_id" not in told:  # a command failed; of runs Kubeflow says it
                told["state"] = "not started" if "exit_code" in told else kubeflow.UNKNOWN
            came_to = _of_run(storage, loaded, told)
            heading = f"Training of {loaded.name}: {ENDED.get(came_to.state, came_to.state)}"
        print_json(came_to.fields()) if output is Output.json else typer.echo(markdown(heading, came_to, told))
        if code := told.get("exit_code") or kubeflow.EXIT_CODES.get(came_to.state):
            raise typer.Exit(code)


def _told(result: str) -> Shown:
    """Returns what `baton submit` has printed; that it has failed where it came to print nothing.

    Raises:
        UserError: the file cannot be read, or `baton submit` prints nothing like it.
    """
    remedy = "Give the file that `baton submit --wait --output json > FILE` has written."
    try:
        with open(result, encoding="utf-8") as file:
            text = file.read()
        if not text.strip():
            return Shown(state="failed", error="It ended without saying why.")
        told: Shown = TypeAdapter(Shown).validate_python(load(text), strict=True)
        if "state" not in told:
            raise ValueError("it has no state")
        return told
    except OSError as error:
        raise UserError(f"--result {result!r} cannot be read: {error.strerror}.", remedy=remedy) from None
    except ValueError as error:  # no UTF-8, no JSON, or values of another kind
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise UserError(f"--result {result!r} is no answer of `baton submit`: {reason}.", remedy=remedy) from None


def _kept(storage: Storage, name: str, run_id: str) -> Retraining:
    """Returns what a retraining came to, as its last stage has left it in the store.

    Raises:
        BatonError: it has left nothing, or the store cannot be read.
    """
    path = f"models/{name}/outcomes/{run_id}.json"
    try:
        return Retraining.read(json.loads(storage.read(path)))
    except FileNotFoundError:
        raise UserError(
            f"{storage.uri(path)} does not exist; expected what retraining {run_id!r} came to.",
            remedy="Check the id and the store, and that the run has ended.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{storage.uri(path)} is not what a retraining came to.") from None


def _of_run(storage: Storage, recipe: Recipe, told: Shown) -> Retraining:
    """Returns what a run came to: its state as Kubeflow tells it, and its figures where the store can be read."""
    came_to = Retraining(told["state"], told.get("error", ""), now(), run=told.get("run"))
    if came_to.run is None or came_to.state not in ("succeeded", "rejected"):
        return came_to
    run = Run(storage, prepare.last_run_name(recipe, came_to.run))
    try:
        evaluation, exported, page = run.read(EvaluationResult), run.read(ExportedModel), run.read(ReportPage)
    except BatonError:
        return came_to
    gate = evaluation.gate.lines if evaluation and evaluation.gate else []
    return replace(
        came_to,
        run_uri=run.uri,
        summary=evaluation.summary if evaluation else None,
        gate=[{"words": line.words, "held": line.held} for line in gate],
        model_uri=exported.model_uri if exported and came_to.state == "succeeded" else None,
        report_uri=page.report_uri if page else None,
    )


def markdown(heading: str, outcome: Retraining, told: Shown) -> str:
    """Returns what a run came to, for a comment.

    Args:
        heading: What it was, and how it ended.
        outcome: What it came to.
        told: What Kubeflow says of it.
    """
    lines = [f"### {heading}", "", outcome.words]
    # As code: a message may quote rows, and no part of it is to become a mention, a link or HTML.
    lines += [f"- {stage['stage']}: `{_plain(stage['message'])}`" for stage in told.get("failed", [])]
    if outcome.summary:
        lines += ["", outcome.summary]
    if outcome.gate:
        lines += ["", "| gate | held |", "|---|---|"]
        lines += [
            f"| {line['words'].replace('|', chr(92) + '|')} | {'yes' if line['held'] else '**no**'} |"
            for line in outcome.gate
        ]
    lines += ["", *(f"- {what}: `{uri}`" for what, uri in _links(outcome))]
    lines += [f"- Kubeflow: {told['url']}"] if "url" in told else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()


def _plain(message: str | None) -> str:
    return " ".join((message or "its pod says nothing").split()).replace("`", "'")


def _run(recipe: Recipe, runner: options.Runner) -> Retraining:
    """Runs the compiled pipeline on this machine and returns what it came to."""
    from baton.local import engine
    from baton.retrain import lock

    outcomes: list[Retraining] = []

    def heard(event: events.Event) -> None:
        match event:
            case Retraining():
                outcomes.append(event)
            case events.Looked(decision="train"):
                console.print(f"run [bold]{event.run}[/]: {escape(event.words)}")
            case events.Queued():
                console.print(f"[yellow]waits for the retraining under way since {event.since}[/]")
        display.heard(event)

    os.environ[lock.PROCESS] = lock.this_process()
    with Display(0 if recipe.phases else recipe.num_chunks) as display:
        engine.run_recipe(
            recipe,
            f"{recipe.name}-retrain",
            pipeline=Pipeline.retrain,
            arguments={},
            on_event=heard,
            containers=runner is options.Runner.docker,
        )
    return outcomes[-1]


def _in_words(name: str, outcome: Retraining) -> str:
    lines = [f"{name}: {SAID[outcome.state]} ({outcome.words})"]
    return "\n".join(lines + [f"{what + ':':8}{uri}" for what, uri in _links(outcome)])


def _links(outcome: Retraining) -> list[tuple[str, str]]:
    links = (("run", outcome.run_uri), ("model", outcome.model_uri), ("report", outcome.report_uri))
    return [(what, uri) for what, uri in links if uri]
