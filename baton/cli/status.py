"""Commands about one run, on this machine or on Kubeflow: `baton status`, `logs`, `open`, `stop`, `retry`, `diff`."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from baton import api, machine
from baton.cli import address, options
from baton.cli.address import Address, RunArgument, StoreOption
from baton.cli.display import Display, console, screen
from baton.errors import BatonError, UserError
from baton.local import begun, results
from baton.recipe.run import code_in
from baton.runs.run import Run
from baton.runs.spending import in_words
from baton.source import prepare
from baton.source.origin import RecipeSource
from baton.store.storage import Storage

if TYPE_CHECKING:
    from baton.prove.diff import RunDifference

ENDPOINTS = ("BATON_KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
STOP_S = 30.0  # seconds that a run has to end by itself
POLL_S = 0.5
MOST_ROWS = 30  # of runs on Kubeflow
LONGEST_NAME = 120  # characters of a page's name
RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # of Kubeflow

AnyEndpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        help="Kubeflow Pipelines API of the run. Default: where it was submitted, else BATON_KFP_ENDPOINT.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Remote:
    """A run on Kubeflow, by name or id."""

    run: str
    endpoint: str
    namespace: str | None


def find(run: str, endpoint: str | None, namespace: str | None, store: str | None) -> Address | Remote:
    """Returns a run here or on Kubeflow, by name, path, URI or id."""
    if endpoint:
        return Remote(run, endpoint, namespace)
    if store or "/" in run:
        return address.existing(run, store)
    known = begun.find(run)
    if known and known.endpoint:
        if address.in_default_store(run):
            note = f"note: run {run!r} on Kubeflow; for that of {options.DEFAULT_STORE} give --store"
            typer.echo(note, err=True)
        return Remote(known.run_id or run, known.endpoint, namespace or known.namespace or None)
    from_environment = next((value for name in ENDPOINTS if (value := os.environ.get(name))), None)
    if from_environment and (RUN_ID.fullmatch(run) or not known):
        try:
            return address.existing(run)
        except UserError:
            return Remote(run, from_environment, namespace)
    try:
        return address.resolve(run)
    except UserError as error:
        on_cluster = "For a run on Kubeflow give --endpoint, or set BATON_KFP_ENDPOINT."
        raise UserError(error.message, remedy=f"{error.remedy} {on_cluster}") from None


def _process(run: Run) -> psutil.Process | None:
    known = begun.find(run.name, run.uri)
    return known.process if known else None


def _has_ended(run: Run, seconds: float) -> bool:
    """Waits until no process of this machine runs a run, and tells whether that came in time."""
    deadline = time.monotonic() + seconds  # `psutil.Process.wait` waits for a zombie, too
    while _process(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help=f"{address.HELP}. Default: all runs on Kubeflow.", show_default=False),
    ] = None,
    endpoint: AnyEndpoint = None,
    store: StoreOption = None,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Show how far a run is, and why a stage failed or waits.

    Without RUN, list the newest runs on Kubeflow with step, loss, starts and time left. Exit code: 0 for a run that
    succeeded, was interrupted or still runs. 1 for one that failed or was canceled, 3 for a model rejected by the gate.
    """
    with options.answer(json):
        if run is None:
            from baton.cli import follow

            rows = follow.runs(_endpoint(endpoint), namespace, MOST_ROWS)
            if json:
                options.print_json({"runs": [asdict(row) for row in rows]})
            else:
                follow.print_runs(rows, screen())
            return
        found = find(run, endpoint, namespace, store)
        if isinstance(found, Remote):
            from baton.cli import follow

            out = console if json else screen()
            shown = follow.status(found.run, found.endpoint, found.namespace, timeout if wait else None, out)
            options.end_run(shown, json)
            return
        process = _process(found.run)
        if wait and process:
            _has_ended(found.run, timeout * 3600)
            process = _process(found.run)
        state = results.status(found.run)
        if json:
            options.print_json({**state, "pid": process.pid if process else None})
        else:
            _print_status(state, process)
        if code := options.EXIT_CODES.get(state["state"]):
            raise typer.Exit(code)


def _endpoint(endpoint: str | None) -> str:
    """Returns the endpoint for runs that are not named; `UserError` without one."""
    endpoint = endpoint or next((value for name in ENDPOINTS if (value := os.environ.get(name))), None)
    if not endpoint:
        remedy = "Name a run; `baton runs list` lists those of a store. For Kubeflow give --endpoint."
        raise UserError("no run and no Kubeflow endpoint is given.", remedy=remedy)
    return endpoint


def _print_status(state: results.Status, process: psutil.Process | None) -> None:
    where = f" (process {process.pid})" if process else ""
    typer.echo(f"{state['run']}: {state['state']}{where}")
    steps = f"{state['step']:,} of {state['num_steps']:,}" if state["num_steps"] else f"{state['step']:,}"
    saved = f", checkpoint at {state['saved_step']:,}" if state["saved_step"] else ", no checkpoint yet"
    typer.echo(f"step:   {steps}{saved}")
    if state["loss"] is not None:
        typer.echo(f"loss:   {state['loss']:.4g}")
    if "budget" in state:
        typer.echo(f"budget: {in_words(state['budget'])}")
    if state["resumed"]:
        typer.echo(f"resumed: {results.times(state['resumed'])}")
    if state["error"]:
        typer.secho(f"failed: {state['error']}", fg=typer.colors.RED)
    for name, uri in (("run", state["run_uri"]), ("report", state["report_uri"]), ("model", state["model_uri"])):
        if uri:
            typer.echo(f"{name + ':':8}{uri}")
    if state["state"] in ("interrupted", "failed", "canceled"):
        typer.echo(f"next:   baton retry {state['run']}")


def logs(
    run: RunArgument,
    stage_name: Annotated[
        str | None, typer.Argument(metavar="STAGE", help="Stage on Kubeflow, as --stage.", show_default=False)
    ] = None,
    follows: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until the run ends.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines to print; 0 for all.")] = 100,
    stage: Annotated[
        str | None, typer.Option(help="Stage on Kubeflow, such as `train chunk 2`. Default: the failed or newest one.")
    ] = None,
    endpoint: AnyEndpoint = None,
    store: StoreOption = None,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Print the output of a run's stages.

    On Kubeflow from the pod while it exists, else from the archived artifact `executor-logs`.
    """
    with options.answer(json):
        found = find(run, endpoint, namespace, store)
        if isinstance(found, Remote):
            from baton.cli import follow

            name, text = follow.logs(found.run, found.endpoint, found.namespace, stage or stage_name)
            shown = text.splitlines()[-lines:] if lines else text.splitlines()
            if json:
                options.print_json({"run": run, "stage": name, "lines": shown})
            else:
                typer.echo("\n".join(shown))
            return
        path = (begun.find(found.run.name, found.run.uri) or begun.BegunRun(name=found.run.name)).log
        if not os.path.isfile(path):
            remedy = "Its log is on the machine that ran it, in Baton's cache."
            raise UserError(f"no log of run {found.run.name!r} is on this machine.", remedy=remedy)
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
            shown = text.splitlines()[-lines:] if lines else text.splitlines()
            if json:
                options.print_json({"run": found.run.name, "log": path, "lines": shown})
                return
            typer.echo("\n".join(shown))
            while follows and _process(found.run):
                time.sleep(POLL_S)
                typer.echo(file.read(), nl=False)


def open_page(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN …", help=f"{address.HELP}; several are compared.", show_default=False),
    ] = None,
    on_kubeflow: Annotated[
        bool, typer.Option("--kubeflow", help="Instead of RUN: a page of the newest runs on Kubeflow.")
    ] = False,
    endpoint: AnyEndpoint = None,
    store: StoreOption = None,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Open a run's report or Kubeflow page; compare several runs.

    Opens it in the browser and prints its address. A comparison overlays losses, and lists figures, digests and
    differing settings.
    """
    with options.answer(json):
        if on_kubeflow is bool(runs):
            raise UserError("expected one of RUN and --kubeflow.")
        if not runs:
            page = _namespace_page(_endpoint(endpoint), namespace)
        elif len(runs) > 1:
            page = _comparison(runs, store)
        elif isinstance(found := find(runs[0], endpoint, namespace, store), Remote):
            from baton.cli import follow

            page = follow.page(found.run, found.endpoint, found.namespace)
        else:
            page = _local_page(found.run)
        if json:
            named = {"run": runs[0]} if runs and len(runs) == 1 else {"runs": runs or []}
            options.print_json({**named, "page": page})
        else:
            typer.echo(page)
            webbrowser.open(page if "://" in page else f"file://{page}")


def _namespace_page(endpoint: str, namespace: str | None) -> str:
    """Writes the page of the newest runs on Kubeflow into the cache, and returns its path."""
    from baton.cli import follow
    from baton.kubeflow.namespace import render

    title = f"Runs of {namespace}" if namespace else f"Runs on {endpoint}"
    page = options.default_page(None, "kubeflow.html")
    Path(page).write_text(render(follow.runs(endpoint, namespace, MOST_ROWS), title), encoding="utf-8")
    return page


def _local_page(run: Run) -> str:
    """Returns a report's path, of a copy in the cache where the store is a bucket."""
    from baton.pages.publish import LivePage

    state, known = results.status(run), begun.find(run.name, run.uri)
    if state["state"] == "interrupted" and known and not known.endpoint:
        LivePage(run.uri).write(is_stopped=True)  # a killed process has left a page of a run that trains, or none
    if (uri := results.report_uri(run)) is None:
        raise UserError(f"run {run.name!r} has no report; its state is {state['state']}.")
    if "://" not in uri:
        return uri
    folder, _, name = uri.rpartition("/")
    path = os.path.join(machine.cache_dir(), "pages", f"{run.name}.html")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(Storage(folder).read(name))
    return path


def _comparison(texts: Sequence[str], store: str | None) -> str:
    """Writes the page that compares runs, and returns its path: in the first run's store, or in the cache."""
    from baton.pages import compare

    found = [address.existing(text, store) for text in texts]
    if at_step := next((text for text, one in zip(texts, found, strict=True) if one.step is not None), None):
        raise UserError(f"{at_step!r} names a step.", remedy="`baton diff A@STEP B@STEP` compares checkpoints.")
    runs = [one.run for one in found]
    if len({run.uri for run in runs}) < len(runs):
        raise UserError("a run is named twice.", remedy="Name each run once.")
    name = "-vs-".join(run.name for run in runs)
    if len(name) > LONGEST_NAME:
        name = f"{runs[0].name}-vs-{len(runs) - 1}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    storage = runs[0].storage
    page = options.default_page(storage.root if storage.is_local else None, f"{name}.html")
    Path(page).write_text(compare.compare(runs, begun.live_since), encoding="utf-8")
    return page


def stop(
    run: RunArgument,
    endpoint: AnyEndpoint = None,
    store: StoreOption = None,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Stop a run; `baton retry` resumes it."""
    with options.answer(json):
        found = find(run, endpoint, namespace, store)
        if isinstance(found, Remote):
            from baton.cli import follow

            options.end_run(follow.cancel(found.run, found.endpoint, found.namespace), json)
            return
        process = _process(found.run)
        if process is None:
            raise UserError(f"run {found.run.name!r} does not run on this machine.", remedy="`baton status` shows it.")
        process.send_signal(signal.SIGTERM)
        if not _has_ended(found.run, STOP_S):
            raise BatonError(f"process {process.pid} has not ended after {STOP_S:.0f} s.")
        state = results.status(found.run)
        if json:
            options.print_json(state)
        else:
            resumes = f"resumes at step {state['saved_step']:,}" if state["saved_step"] else "starts again"
            typer.echo(f"{found.run.name}: stopped; `baton retry {found.run.name}` {resumes}")


def retry(
    run: RunArgument,
    endpoint: AnyEndpoint = None,
    store: StoreOption = None,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    namespace: options.Namespace = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Resume a stopped or failed run from its newest checkpoint.

    A run here is started by its own command, or by the recipe in its store.
    """
    with options.answer(json, trust):
        found = find(run, endpoint, namespace, store)
        if isinstance(found, Remote):
            from baton.cli import follow

            options.end_run(follow.retry(found.run, found.endpoint, found.namespace, timeout if wait else None), json)
            return
        if process := _process(found.run):
            raise UserError(f"run {found.run.name!r} still runs, as process {process.pid}.")
        known = begun.find(found.run.name, found.run.uri)
        if known and known.command:
            words = [word for word in known.command if word != "--json"]
            code = subprocess.call(
                [sys.executable, "-m", "baton", *words, *(["--json"] if json else [])], cwd=known.folder
            )
            raise typer.Exit(code)
    _resume(found.run, json, trust)


def _resume(run: Run, json: bool, trust: bool) -> None:
    """Resumes a run by the recipe in its store."""
    from baton.cli import local

    with options.answer(json, trust):
        api.existing_run(run.uri)
        recipe = run.recipe()
        source = RecipeSource(run.uri, "", os.getcwd())
        code = code_in(recipe.model_dump(mode="json", exclude_defaults=True))
        prepare.refuse_untrusted(source, [] if run.storage.is_local else code)
        begins = api.LocalRun.of(prepare.LoadedRecipe(recipe, source), run.name)
        local.start(begins, ["retry", run.uri], json=json)


def diff(
    a: Annotated[str, typer.Argument(metavar="A[@STEP]", help=f"{address.HELP}.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B[@STEP]", help="Run to compare with it.", show_default=False)],
    store: StoreOption = None,
    json: options.Json = False,
) -> None:
    """Compare two runs: first difference and likely cause.

    Names the first step and tensor that differ, settings and environment. Exit code 1 means a difference.
    """
    with options.answer(json):
        from baton.prove import diff as comparing

        first, second = (address.existing(text, store) for text in (a, b))
        with Display(0):
            found = comparing.diff(first.run, second.run, (first.step, second.step))
        options.print_json(found) if json else _print_diff(found)
        if not found["equal"]:
            raise typer.Exit(1)


def _print_diff(found: RunDifference) -> None:
    typer.echo(f"A: {found['a']}")
    typer.echo(f"B: {found['b']}")
    if value := found["first_value"]:
        name = f"{value['name']} of step {value['step']:,}"
        typer.echo(f"first value:  {name}: {value['expected']!r} → {value['found']!r}")
    if state := found["first_state"]:
        until = f"; equal until {state['equal_until']:,}" if state["equal_until"] else ""
        typer.echo(f"first state:  step {state['step']:,}: {', '.join(state['parts'])}{until}")
        for tensor in state["tensors"][:SHOWN]:
            largest = f", by {tensor['max_abs']:.3g} at most" if tensor["max_abs"] is not None else ""
            count = f"{tensor['count']:,} of {tensor['of']:,} differ{largest}" if tensor["name"] else tensor["what"]
            typer.echo(f"  {tensor['file']} {tensor['name']}: {count}")
        if (more := state["num_tensors"] - SHOWN) > 0:
            typer.echo(f"  and {more:,} more")
    if found["equal"]:
        typer.echo(f"equal:        {len(found['compared_steps'])} checkpoint(s) and all common logged values")
    for about in ("recipe", "data", "environment"):
        for line in found[about]:
            typer.echo(f"{about + ':':14}{line}")
    typer.echo(f"likely cause: {found['cause']}")


SHOWN = 8  # differing tensors on a terminal
