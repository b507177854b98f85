"""`baton run`: the pipeline, or with --if-changed a retraining, on this machine."""

import contextlib
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.markup import escape

from baton import api, events, machine
from baton.cli import options
from baton.cli.display import Display, Verbosity, console
from baton.cli.kubeflow import RETRAINED, links
from baton.compiler.pipeline_file import Pipeline
from baton.errors import BatonError, UserError
from baton.kfp import processes
from baton.local import begun, results
from baton.models import prompts
from baton.runs.documents import RunInfo
from baton.runs.outcomes import ReportPage
from baton.runs.run import ORIGIN, Run
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
    limit: options.Limit = None,
    by: options.By = None,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Retrain only if data or recipe have changed since the last model.")
    ] = False,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Train, evaluate and export on this machine, or resume a run.

    --run NAME resumes that run. Each stage is a process, or a container with --runner docker. With --if-changed, the
    gate compares the new model with the one in use, and promotes the better. Exit code 3 means a model rejected by the
    gate.
    """
    overrides = options.budgeted(overrides, limit, by)
    if if_changed:
        with options.answer(json):
            if run_name:
                raise UserError("--if-changed names its runs itself.", remedy="Leave out --run.")
        retrain(recipe, overrides, store, chunks, runner, image, json, trust)
        return
    with options.answer(json, trust):
        loaded = api.load(recipe, overrides, store=store, chunks=chunks, image=image)
        local = api.LocalRun.of(loaded, run_name)
        is_docker = runner is options.Runner.docker
        words = [
            "run",
            recipe,
            "--run",
            local.run.name,
            *given("--set", *overrides),
            *given("--store", store),
        ]
        words += [*given("--chunks", chunks), *given("--runner", "docker" if is_docker else None)]
        words += [*given("--image", image), *(["--trust"] if trust else [])]
        start(local, [] if loaded.origin.is_foreign and "://" not in recipe else words, json, is_docker=is_docker)


def given(option: str, *values: str | int | None) -> list[str]:
    """Returns an option as words of a command, once for each value that is there."""
    return [word for value in values if value is not None for word in (option, str(value))]


def start(local: api.LocalRun, command: Sequence[str], json: bool, *, is_docker: bool = False) -> None:
    """Runs a recipe to its end and prints the result; `command` resumes it, none where its recipe was piped."""
    name, last = local.run.name, local.last
    first = f"{name}-{local.recipe.phases[0].name}" if local.recipe.phases else name
    has_begun = Run(last.storage, first).raw(RunInfo.NAME) is not None and last.raw(ReportPage.NAME) is None
    phases = [f"{local.run.uri}-{phase.name}" for phase in local.recipe.phases]
    begun.note_here(name, local.run.uri, command, resumes=has_begun, phases=phases)
    options.resumable(command or ["retry", name])
    try:
        if not Verbosity.is_quiet:
            console.print(f"run [bold]{name}[/] at {escape(local.run.uri)}")
        num_chunks = 0 if local.recipe.phases else local.recipe.num_chunks
        display = Display(num_chunks, local.recipe.training.batch_size, resumes=has_begun)
        with begun_by(command), display:
            result = local.start(display.heard, containers=is_docker)
    except BatonError as error:
        if isinstance(error, UserError) or not json:
            raise
        options.print_json({**local.result(), "state": "failed", "error": str(error)})
        typer.secho(f"baton: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(error.exit_code) from None
    if json:
        options.print_json(result)
    else:
        _print_resumes(last, result)
        _print_end(result, (last.raw("evaluation.json") or {}).get("samples", []))
    if result["state"] == "rejected":
        raise typer.Exit(options.REJECTED)


@contextlib.contextmanager
def begun_by(words: Sequence[str]) -> Iterator[None]:
    """Names the command that begins runs, and the commit of the folder here, to their first stages; takes SIGTERM.

    The store and the report keep it, so it has no credentials: a setting that a later one replaces may hold some.
    """
    from baton.tracking.client import without_credentials

    # `baton stop` sends SIGTERM: a run in the background of a script ignores SIGINT.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = without_credentials(shlex.join(["baton", *words])) if words else None
    values = {"command": command, "commit": machine.commit() or None}
    try:
        with processes.environment(**{ORIGIN[field]: value for field, value in values.items()}):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_resumes(run: Run, result: results.Result) -> None:
    """Prints how often a run was resumed, and whether on the same bits; the digest with -v, or after a resume."""
    resumed, rows = results.num_resumes(run), results.list_checkpoints(run)
    digest = result["checkpoints"][-1]["digest"] if result["checkpoints"] else ""
    if resumed:
        is_exact = all(row.get("level") == "bitwise" for row in rows)
        how = "bit-identical" if is_exact else "on another machine or without all state: bits may differ"
        typer.echo(f"resumed {results.times(resumed)}, {how}; final digest {digest[:16]}")
    elif digest and Verbosity.is_verbose:
        typer.echo(f"digest: {digest}")


def _print_end(result: results.Result, samples: list[dict[str, str]]) -> None:
    prompt = samples[0]["prompt"] if samples else "The"
    typer.echo(f"report: {result['report_uri']}")
    if result["state"] == "rejected":
        for line in result["gate"]:
            typer.secho(f"gate:   {line['words']}", fg=None if line["held"] else typer.colors.RED)
        typer.secho("rejected by the gate; nothing exported", fg=typer.colors.RED)
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
    """Retrain a model if data or recipe have changed, and promote it if it passes the gate.

    Compares with the model in use (evaluation.production: accepted). One retraining of a model runs at a time; an
    interrupted one resumes. Exit code 3 means a model rejected by the gate.
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
                    begun.note_here(event.run, Run(Storage(loaded.store.uri), event.run).uri, words)
                    console.print(f"run [bold]{event.run}[/]: {escape(event.words)}")
                case events.Queued():
                    console.print(f"[yellow]waiting for the retraining that runs since {event.since}[/]")
            display.heard(event)

        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks, image=image).localised()
        prepare.check_store(loaded)
        os.environ[PROCESS] = this_process()
        words = ["run", recipe, "--if-changed", *given("--set", *(overrides or ())), *given("--store", store)]
        words += given("--chunks", chunks)
        options.resumable(words)
        with begun_by(words), Display(0 if loaded.phases else loaded.num_chunks, loaded.training.batch_size) as display:
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
