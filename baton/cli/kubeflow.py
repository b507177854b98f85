"""Runs on Kubeflow: `baton submit`, `status`, `cancel`, `retry`, `schedule`, `schedules` and `ci-report`."""

import re
from dataclasses import asdict, replace
from json import dumps, loads
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from baton import api
from baton.cli import options
from baton.cli.display import console, note, screen
from baton.compiler.pipeline_file import Pipeline
from baton.documents import load
from baton.errors import BatonError, DamagedError, UserError
from baton.events import Retraining
from baton.recipe import load as recipe_file
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import EvaluationResult, ExportedModel, ReportPage
from baton.runs.run import Run, now
from baton.source import origin, prepare
from baton.store.storage import Storage

app = typer.Typer(help="Retraining by the clock.", no_args_is_help=True)

RETRAINED = {  # state of a retraining → in words
    "unchanged": "nothing to do",
    "busy": "dropped",
    "promoted": "promoted",
    "rejected": "rejected, the model in use stays",
    "failed": "failed, the model in use stays",
}
ENDED = {  # state of any other run → in words
    "succeeded": "succeeded",
    "rejected": "rejected by its gate",
    "failed": "failed",
    "canceled": "cancelled",
    options.UNKNOWN: "not followed to its end, the run may go on",
}
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name or id of the run.", show_default=False)]


def submit(
    recipe: options.RecipePath,
    endpoint: options.Endpoint,
    experiment: options.Experiment = None,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    retries: options.Retries = 0,
    namespace: options.Namespace = None,
    service_account: options.ServiceAccount = None,
    cache: options.Cache = True,
    registers: options.Registers = True,
    overrides: options.Overrides = None,
    store: options.Store = None,
    run_name: options.RunName = None,
    chunks: options.ChunkCount = None,
    image: options.Image = None,
    pipeline: options.PipelineOption = Pipeline.finetune,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Uploads a recipe's pipeline to Kubeflow, starts a run and prints its page.

    A bearer token is read from BATON_KFP_TOKEN or KF_PIPELINES_TOKEN. With --wait the exit code is 1 where the run
    fails, 3 where the gate rejects the model.
    """
    with options.answer(json, trust):
        from baton.cli import follow
        from baton.kubeflow.submit import version_url

        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks, image=image, here=False)
        submitter = api.Submitter(
            loaded,
            endpoint,
            run_name,
            pipeline,
            note,
            experiment=experiment,
            namespace=namespace,
            service_account=service_account,
            cache=cache,
            registers=registers,
        )
        submission = submitter.submit()
        name, url = submission.run_name, submission.url
        console.print(f"started [bold]{name}[/]: {url}", soft_wrap=True)
        shown: options.RunAnswer = {"run": name, "run_id": submission.run_id, "url": url, "state": "submitted"}
        if version := submission.registered:
            shown |= {"pipeline": version.pipeline, "version": version.version}
            known = "new" if version.is_new else "as before"
            console.print(f"its pipeline, {known}: {version_url(endpoint, version)}", soft_wrap=True)
        if pipeline is Pipeline.sweep:
            shown["sweep_uri"] = f"{loaded.recipe.store.uri.rstrip('/')}/sweeps/{name}"
            console.print(f"its trials: baton sweep status {shown['sweep_uri']}", soft_wrap=True)
        if wait:
            shown |= follow.with_retries(submitter, submission, timeout, retries)
        _end(shown, json)


def _end(shown: options.RunAnswer, json: bool) -> None:
    options.print_json(shown) if json else typer.echo(shown["url"])
    if code := shown.get("exit_code") or options.EXIT_CODES.get(shown["state"]):
        raise typer.Exit(code)


def status(
    run: RunName,
    endpoint: options.Endpoint,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Shows a run on Kubeflow: each stage, and why one failed or does not start.

    The exit code is 0 where the run has succeeded or still runs, 1 where it has failed or was
    cancelled, and 3 where its gate rejected the model.
    """
    with options.answer(json):
        from baton.cli import follow

        _end(follow.status(run, endpoint, namespace, timeout if wait else None, console if json else screen()), json)


def cancel(
    run: RunName, endpoint: options.Endpoint, namespace: options.Namespace = None, json: options.Json = False
) -> None:
    """Ends a run on Kubeflow. What its newest checkpoint holds is kept, and `baton retry` resumes from there."""
    with options.answer(json):
        from baton.cli import follow

        _end(follow.cancel(run, endpoint, namespace), json)


def retry(
    run: RunName,
    endpoint: options.Endpoint,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Starts the failed stages of a run on Kubeflow again. Training resumes from the newest checkpoint."""
    with options.answer(json):
        from baton.cli import follow

        _end(follow.retry(run, endpoint, namespace, timeout if wait else None), json)


def schedule(
    recipe: options.RecipePath,
    endpoint: options.Endpoint,
    cron: Annotated[
        str, typer.Option(metavar="LINE", help="When: minute, hour, day, month, weekday, as in '0 3 * * *', or @daily.")
    ],
    namespace: options.Namespace = None,
    service_account: options.ServiceAccount = None,
    registers: options.Registers = True,
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    image: options.Image = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Retrains a recipe's model by the clock, where its data or the recipe have changed.

    It takes the place of an earlier schedule of the recipe. The times are those of Kubeflow's clock: UTC, unless its
    administrator has set another.
    """
    with options.answer(json, trust):
        from baton.kubeflow import submit as kubeflow

        line = kubeflow.cron_line(cron)
        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks, image=image, here=False)
        terms = api.Terms(namespace=namespace, service_account=service_account, registers=registers)
        made = api.Submitter(loaded, endpoint, None, Pipeline.retrain, note, **terms).schedule(line)
        if json:
            options.print_json(asdict(made))
        else:
            typer.echo(f"{made.recipe} is retrained at '{made.cron}' ({made.identifier})")
            typer.echo(f"times are those of Kubeflow's clock: {kubeflow.CLOCK}")


@app.command("list")
def list_schedules(endpoint: options.Endpoint, namespace: options.Namespace = None, json: options.Json = False) -> None:
    """Lists the schedules that there are."""
    with options.answer(json):
        from baton.kubeflow import submit as kubeflow

        schedules = kubeflow.schedules(endpoint, namespace)
        if json:
            options.print_json({"schedules": [asdict(each) for each in schedules]})
            return
        for each in schedules:
            state = "enabled" if each.is_enabled else "disabled"
            typer.echo(f"{each.recipe}\t{each.cron}\t{state}\t{each.identifier}")
        if schedules:
            typer.echo(f"times: {kubeflow.CLOCK}", err=True)


@app.command("delete")
def delete_schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.", show_default=False)],
    endpoint: options.Endpoint,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Deletes the schedule of a recipe; a run that is under way continues."""
    with options.answer(json):
        from baton.kubeflow import submit as kubeflow

        schedules = kubeflow.delete_schedules(endpoint, name, namespace)
        if json:
            options.print_json({"deleted": [asdict(each) for each in schedules]})
        else:
            typer.echo(f"{name} is not retrained by the clock any more")


def ci_report(
    recipe: options.RecipePath,
    run_id: Annotated[
        str | None, typer.Option("--id", help="Id of the Kubeflow run, as `baton submit` prints it.")
    ] = None,
    result: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Instead of --id: what `baton submit --wait --json` has printed."),
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Tells what a run on a cluster came to, as Markdown for a comment: by its id a retraining, else any.

    The exit code is 0 where it was promoted, has succeeded or had nothing to do, 3 where the gate
    rejected the model, and else that of what failed.
    """
    with options.answer(json):
        changes = [*(overrides or ()), *([f"store.uri={dumps(store)}"] if store else [])]
        source = origin.find(recipe)
        loaded = recipe_file.validate(source.document(changes), origin=source.name)
        storage = Storage(loaded.store.uri)
        if (run_id is None) == (result is None):
            raise UserError("expected one of --id and --result.")
        submitted = _submitted(result) if result is not None else options.RunAnswer(run_id=run_id or "")
        try:
            came_to = _kept(storage, loaded.name, submitted["run_id"])
            heading = f"Retraining of {loaded.name}: {RETRAINED.get(came_to.state, came_to.state)}"
        except (BatonError, KeyError):
            if result is None:
                raise
            if submitted["state"] == "failed" and "run_id" not in submitted:
                # The command failed: the end of a run is Kubeflow's word.
                submitted["state"] = "not started" if "exit_code" in submitted else options.UNKNOWN
            came_to = _of_run(storage, loaded, submitted)
            heading = f"Training of {loaded.name}: {ENDED.get(came_to.state, came_to.state)}"
        options.print_json(came_to.fields()) if json else typer.echo(_markdown(heading, came_to, submitted))
        if code := submitted.get("exit_code") or options.EXIT_CODES.get(came_to.state):
            raise typer.Exit(code)


def _submitted(result: str) -> options.RunAnswer:
    remedy = "Give the file that `baton submit --wait --json > FILE` has written."
    try:
        with open(result, encoding="utf-8") as file:
            text = file.read()
        if not text.strip():
            return options.RunAnswer(state="failed", error="It ended without saying why.")
        submitted: options.RunAnswer = TypeAdapter(options.RunAnswer).validate_python(load(text), strict=True)
        if "state" not in submitted:
            raise ValueError("it has no state")
        return submitted
    except OSError as error:
        raise UserError(f"--result {result!r} cannot be read: {error.strerror}.", remedy=remedy) from None
    except ValueError as error:  # no UTF-8, no JSON, or values of another kind
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise UserError(f"--result {result!r} is no answer of `baton submit`: {reason}.", remedy=remedy) from None


def _kept(storage: Storage, name: str, run_id: str) -> Retraining:
    path = f"models/{name}/outcomes/{run_id}.json"
    try:
        return Retraining.read(loads(storage.read(path)))
    except FileNotFoundError:
        raise UserError(
            f"{storage.uri(path)} does not exist; expected what retraining {run_id!r} came to.",
            remedy="Check the id and the store, and that the run has ended.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{storage.uri(path)} is not what a retraining came to.") from None


def _of_run(storage: Storage, recipe: Recipe, submitted: options.RunAnswer) -> Retraining:
    """Returns a run's state as Kubeflow has it, with figures where the store can be read."""
    came_to = Retraining(submitted["state"], submitted.get("error", ""), now(), run=submitted.get("run"))
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


def _markdown(heading: str, outcome: Retraining, submitted: options.RunAnswer) -> str:
    lines = [f"### {heading}", "", outcome.words]
    # As code: a message may quote rows, and no part of it is to become a mention, a link or HTML.
    lines += [f"- {stage['stage']}: `{_plain(stage['message'])}`" for stage in submitted.get("failed", [])]
    if outcome.summary:
        lines += ["", outcome.summary]
    if outcome.gate:
        lines += ["", "| gate | held |", "|---|---|"]
        lines += [
            f"| {line['words'].replace('|', chr(92) + '|')} | {'yes' if line['held'] else '**no**'} |"
            for line in outcome.gate
        ]
    lines += ["", *(f"- {what}: `{uri}`" for what, uri in links(outcome))]
    lines += [f"- Kubeflow: {submitted['url']}"] if "url" in submitted else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()


def _plain(message: str | None) -> str:
    return " ".join((message or "its pod says nothing").split()).replace("`", "'")


def links(outcome: Retraining) -> list[tuple[str, str]]:
    """Returns the addresses of a run's results, each with its name."""
    links = (("run", outcome.run_uri), ("model", outcome.model_uri), ("report", outcome.report_uri))
    return [(what, uri) for what, uri in links if uri]
