"""`baton retrain` and `baton outcome`: retraining on this machine, and what a retraining came to."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.store.storage import Storage
from baton.pipelines.cli import options
from baton.pipelines.cli.display import Display, console
from baton.pipelines.cli.options import REJECTED, Output, OutputOption, print_json, reported
from baton.pipelines.compiling import prepare
from baton.pipelines.compiling.package import Pipeline
from baton.pipelines.local.processes import Event

SAID = {
    "unchanged": "nothing to do",
    "busy": "dropped",
    "promoted": "promoted",
    "rejected": "rejected, the model in use stays",
    "failed": "failed, the model in use stays",
}
"""State of a retraining → in words."""

LINKS = {"run": "run_uri", "model": "model_uri", "report": "report_uri"}
"""What is told of → its key."""


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
        portable = prepare.load(recipe, overrides or (), store=store, chunks=chunks, image=image)
        loaded = prepare.localise(portable, recipe)
        prepare.check_store(loaded)
        outcome = _run(loaded, runner)
        print_json(outcome) if output is Output.json else typer.echo(_in_words(loaded.name, outcome))
        if outcome["state"] == "rejected":
            raise typer.Exit(REJECTED)


def outcome(
    recipe: options.RecipePath,
    run_id: Annotated[str, typer.Option("--id", help="Id of the Kubeflow run, as `baton submit` prints it.")],
    overrides: options.Overrides = None,
    store: options.Store = None,
    output: OutputOption = Output.text,
) -> None:
    """Tells what a retraining on a cluster came to, as Markdown for a comment.

    The exit code is 0 where it was promoted or had nothing to do, and 3 where the gate rejected the model.
    """
    with reported(output):
        loaded = recipe_file.load(recipe, [*(overrides or ()), *([f"store.uri={json.dumps(store)}"] if store else [])])
        storage = Storage(loaded.store.uri)
        path = f"models/{loaded.name}/outcomes/{run_id}.json"
        try:
            outcome = json.loads(storage.read(path))
        except FileNotFoundError:
            raise UserError(
                f"{storage.uri(path)} does not exist; expected what retraining {run_id!r} came to.",
                remedy="Check the id and the store, and that the run has ended.",
            ) from None
        print_json(outcome) if output is Output.json else typer.echo(markdown(loaded.name, outcome))
        if outcome["state"] in ("rejected", "failed"):
            raise typer.Exit(REJECTED if outcome["state"] == "rejected" else 1)


def markdown(name: str, outcome: Event) -> str:
    """Returns what a retraining came to, for a comment.

    Args:
        name: The recipe's.
        outcome: As `baton.components.retrain.outcome` keeps it.
    """
    lines = [f"### Retraining of {name}: {SAID[outcome['state']]}", "", outcome["words"]]
    if outcome.get("summary"):
        lines += ["", outcome["summary"]]
    if outcome.get("gate"):
        lines += ["", "| gate | held |", "|---|---|"]
        lines += [
            f"| {line['words'].replace('|', chr(92) + '|')} | {'yes' if line['held'] else '**no**'} |"
            for line in outcome["gate"]
        ]
    lines += ["", *(f"- {what}: `{outcome[key]}`" for what, key in LINKS.items() if outcome.get(key))]
    return "\n".join(lines).rstrip()


def _run(recipe: Recipe, runner: options.Runner) -> Event:
    """Runs the compiled pipeline on this machine and returns what it came to."""
    from baton.components.shared.runs import turns
    from baton.pipelines.local import engine

    last: Event = {}

    def heard(event: Event) -> None:
        if event["event"] == "retraining":
            last.update(event)
        if event["event"] == "looked" and event["decision"] == "train":
            console.print(f"run [bold]{event['run']}[/]: {event['words']}")
        if event["event"] == "queued":
            console.print(f"[yellow]waits for the retraining under way since {event['since']}[/]")
        display.heard(event)

    os.environ[turns.PROCESS] = turns.this_process()
    with Display(0 if recipe.phases else recipe.chunks.count) as display:
        engine.run_recipe(
            recipe,
            f"{recipe.name}-retrain",
            pipeline=Pipeline.retrain,
            arguments={},
            on_event=heard,
            containers=runner is options.Runner.docker,
        )
    return {name: value for name, value in last.items() if name not in ("event", "at")}


def _in_words(name: str, outcome: Event) -> str:
    lines = [f"{name}: {SAID[outcome['state']]} ({outcome['words']})"]
    lines += [f"{what + ':':8}{outcome[key]}" for what, key in LINKS.items() if outcome.get(key)]
    return "\n".join(lines)
