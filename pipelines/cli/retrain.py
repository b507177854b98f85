"""`baton retrain` and `baton outcome`: retraining on this machine, and what a retraining came to."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.core.events import Retraining
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.store.storage import Storage
from baton.pipelines.cli.display import Display, console
from baton.pipelines.cli.options import (
    REJECTED,
    ChunkCount,
    Image,
    Output,
    OutputOption,
    Overrides,
    RecipePath,
    Runner,
    RunnerOption,
    Store,
    print_json,
    reported,
)
from baton.pipelines.compiling import prepare
from baton.pipelines.compiling.package import Pipeline

SAID = {
    "unchanged": "nothing to do",
    "busy": "dropped",
    "promoted": "promoted",
    "rejected": "rejected, the model in use stays",
    "failed": "failed, the model in use stays",
}
"""State of a retraining → in words."""


def retrain(
    recipe: RecipePath,
    overrides: Overrides = None,
    store: Store = None,
    chunks: ChunkCount = None,
    runner: RunnerOption = Runner.process,
    image: Image = None,
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
        document = {name: value for name, value in outcome.fields().items() if name != "at"}
        print_json(document) if output is Output.json else typer.echo(_in_words(loaded.name, outcome))
        if outcome.state == "rejected":
            raise typer.Exit(REJECTED)


def outcome(
    recipe: RecipePath,
    run_id: Annotated[str, typer.Option("--id", help="Id of the Kubeflow run, as `baton submit` prints it.")],
    overrides: Overrides = None,
    store: Store = None,
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
            document = json.loads(storage.read(path))
        except FileNotFoundError:
            raise UserError(
                f"{storage.uri(path)} does not exist; expected what retraining {run_id!r} came to.",
                remedy="Check the id and the store, and that the run has ended.",
            ) from None
        outcome = Retraining.read(document)
        print_json(document) if output is Output.json else typer.echo(markdown(loaded.name, outcome))
        if outcome.state in ("rejected", "failed"):
            raise typer.Exit(REJECTED if outcome.state == "rejected" else 1)


def markdown(name: str, outcome: Retraining) -> str:
    """Returns what a retraining, by its recipe's name, came to, for a comment."""
    lines = [f"### Retraining of {name}: {SAID[outcome.state]}", "", outcome.words]
    if outcome.summary:
        lines += ["", outcome.summary]
    if outcome.gate:
        lines += ["", "| gate | held |", "|---|---|"]
        lines += [
            f"| {line['words'].replace('|', chr(92) + '|')} | {'yes' if line['held'] else '**no**'} |"
            for line in outcome.gate
        ]
    lines += ["", *(f"- {what}: `{uri}`" for what, uri in _links(outcome))]
    return "\n".join(lines).rstrip()


def _run(recipe: Recipe, runner: Runner) -> Retraining:
    """Runs the compiled pipeline on this machine and returns what it came to."""
    from baton.components.shared.runs import turns
    from baton.pipelines.local import engine

    outcomes: list[Retraining] = []

    def heard(event: events.Event) -> None:
        match event:
            case Retraining():
                outcomes.append(event)
            case events.Looked(decision="train"):
                console.print(f"run [bold]{event.run}[/]: {event.words}")
            case events.Queued():
                console.print(f"[yellow]waits for the retraining under way since {event.since}[/]")
        display.heard(event)

    os.environ[turns.PROCESS] = turns.this_process()
    with Display(0 if recipe.phases else recipe.chunks.count) as display:
        engine.run_recipe(
            recipe,
            f"{recipe.name}-retrain",
            pipeline=Pipeline.retrain,
            arguments={},
            on_event=heard,
            containers=runner is Runner.docker,
        )
    return outcomes[-1]


def _in_words(name: str, outcome: Retraining) -> str:
    lines = [f"{name}: {SAID[outcome.state]} ({outcome.words})"]
    return "\n".join(lines + [f"{what + ':':8}{uri}" for what, uri in _links(outcome)])


def _links(outcome: Retraining) -> list[tuple[str, str]]:
    links = (("run", outcome.run_uri), ("model", outcome.model_uri), ("report", outcome.report_uri))
    return [(what, uri) for what, uri in links if uri]
