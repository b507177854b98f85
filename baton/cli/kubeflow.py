"""`baton kfp`: compile, submit, schedule and summarize runs on Kubeflow."""

import re
from dataclasses import asdict, replace
from json import dumps, loads
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from baton import api
from baton.cli import forecast, options
from baton.cli.display import console, note
from baton.compiler.pipeline_file import Pipeline
from baton.documents import load
from baton.errors import BatonError, DamagedError, UserError
from baton.events import Retraining
from baton.local import begun
from baton.recipe import load as recipe_file
from baton.recipe.recipe import Recipe
from baton.runs.bill import bill
from baton.runs.outcomes import EvaluationResult, ExportedModel, ReportPage
from baton.runs.run import Run, now
from baton.source import origin, prepare
from baton.store.storage import Storage

app = typer.Typer(help="Compile, submit and schedule on Kubeflow", no_args_is_help=True)
schedules_app = typer.Typer(help="List or delete schedules", no_args_is_help=True)  # of earlier releases

RETRAINED = {  # state of a retraining → in words
    "unchanged": "nothing to do",
    "busy": "dropped",
    "promoted": "promoted",
    "rejected": "rejected, the model in use stays",
    "failed": "failed, the model in use stays",
}
ENDED = {  # state of any other run → in words
    "rejected": "rejected by its gate",
    options.UNKNOWN: "not followed to its end, may still run",
}


def compile_recipe(
    recipe: options.RecipePath,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE.yaml", help="File to write.")],
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    image: options.Image = None,
    pipeline: options.PipelineOption = Pipeline.finetune,
    picture: Annotated[
        str | None,
        typer.Option("--graph", metavar="FILE.mmd", help="Also write its graph as Mermaid text."),
    ] = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Compile a recipe to a file for `kfp run submit -f` or the Kubeflow page."""
    with options.answer(json, trust):
        compiled = api.compile(
            recipe,
            output,
            overrides=overrides or (),
            store=store,
            chunks=chunks,
            image=image,
            pipeline=pipeline,
            picture=picture,
            tell=note,
        )
        size = compiled.workflow
        if json:
            at_end = size.spec + size.nodes
            figures = {"bytes": compiled.bytes, "workflow_bytes": size.spec, "workflow_bytes_at_end": at_end}
            about = {"package": output, "chunks": compiled.num_chunks, "note": compiled.note, "graph": picture}
            options.print_json({"state": "compiled", **about, **figures})
            return
        typer.echo(f"{output}: {compiled.num_chunks} chunk(s), {compiled.bytes / 1000:.0f} kB")
        typer.echo(f"workflow: {size.spec / 1000:.0f} kB, {(size.spec + size.nodes) / 1000:,.0f} kB at the end")
        if compiled.note:
            typer.echo(f"note: {compiled.note}")
        if picture:
            typer.echo(picture)


def submit(
    recipe: options.RecipePath,
    endpoint: options.Endpoint = None,
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
    limit: options.Limit = None,
    by: options.By = None,
    pipeline: options.PipelineOption = Pipeline.finetune,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Start a run on Kubeflow and print its page.

    The bearer token comes from BATON_KFP_TOKEN or KF_PIPELINES_TOKEN. With --wait, exit code 1 means a failed run and
    3 a model rejected by the gate.
    """
    with options.answer(json, trust):
        endpoint = options.require_endpoint(endpoint)
        from baton.cli import follow
        from baton.kubeflow.submit import version_url

        changes = options.budgeted(overrides, limit, by)
        loaded = prepare.load(recipe, changes, store=store, chunks=chunks, image=image, here=False)
        # By an earlier run of its store; a budget below the least is refused.
        if loaded.recipe.budget and not loaded.recipe.sweep and (told := forecast.by_earlier(loaded.recipe)):
            forecast.require_budget(loaded.recipe, told)
            for line in forecast.in_words(loaded.recipe, told):
                console.print(line, soft_wrap=True)
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
            known = "new" if version.is_new else "unchanged"
            console.print(f"pipeline, {known}: {version_url(endpoint, version)}", soft_wrap=True)
        if pipeline is Pipeline.sweep:
            shown["sweep_uri"] = f"{loaded.recipe.store.uri.rstrip('/')}/sweeps/{name}"
            console.print(f"trials: baton sweep status {shown['sweep_uri']}", soft_wrap=True)
        begun.note_submitted(
            name, f"{loaded.recipe.store.uri.rstrip('/')}/runs/{name}", endpoint, namespace, submission.run_id
        )
        if wait:
            shown |= follow.with_retries(endpoint, namespace, submission, timeout, retries)
        options.end_run(shown, json)


def heal_runs(
    endpoint: options.Endpoint = None,
    namespace: options.Namespace = None,
    retries: Annotated[int, typer.Option(min=1, max=100, help="Starts of a run after lost pods, at most.")] = 5,
    within: Annotated[float, typer.Option(metavar="HOURS", help="Skip runs that ended earlier.")] = 24.0,
    json: options.Json = False,
) -> None:
    """Start runs again that lost pods have ended.

    Examines the failed runs of a namespace once, and prints a line each. Skips runs that failed by themselves, were
    canceled or are past their deadline. k8s/components/heal runs it every minute. Exit code 1 means a run that
    should be started and cannot be.
    """
    with options.answer(json):
        endpoint = options.require_endpoint(endpoint)
        from baton.kubeflow import connection, heal

        client = connection.connect(endpoint, namespace)
        if not client.installation().get("multi_user"):
            namespace = None  # which a Kubeflow without users refuses
        policy = heal.Policy(retries, within_s=within * 3600)
        looked = []
        for run, decision in heal.round_of(client, namespace, policy):
            looked.append((run, decision))
            if not json:
                typer.echo(f"{run.display_name} ({run.run_id}): {decision.action}: {decision.reason}")
        if json:
            rows = [{"run": run.display_name, "of": run.run_id, **asdict(decision)} for run, decision in looked]
            options.print_json({"runs": rows})
        if any(decision.error for _, decision in looked):
            raise typer.Exit(1)


def schedule(
    recipe: options.RecipePath,
    cron: Annotated[
        str, typer.Option(metavar="LINE", help="Minute, hour, day, month, weekday, as in '0 3 * * *'; or @daily.")
    ],
    endpoint: options.Endpoint = None,
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
    """Retrain a recipe on a schedule, if data or recipe have changed.

    Replaces an earlier schedule of the recipe. Times follow Kubeflow's clock: UTC, unless its administrator has set
    another zone.
    """
    with options.answer(json, trust):
        endpoint = options.require_endpoint(endpoint)
        from baton.kubeflow import submit as kubeflow

        line = kubeflow.cron_line(cron)
        loaded = prepare.load(recipe, overrides, store=store, chunks=chunks, image=image, here=False)
        terms = api.Terms(namespace=namespace, service_account=service_account, registers=registers)
        made = api.Submitter(loaded, endpoint, None, Pipeline.retrain, note, **terms).schedule(line)
        if json:
            options.print_json(asdict(made))
        else:
            typer.echo(f"{made.recipe}: retraining scheduled at '{made.cron}' ({made.identifier})")
            typer.echo(f"times: {kubeflow.CLOCK}")


def list_schedules(
    endpoint: options.Endpoint = None, namespace: options.Namespace = None, json: options.Json = False
) -> None:
    """List the schedules."""
    with options.answer(json):
        endpoint = options.require_endpoint(endpoint)
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


def delete_schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.", show_default=False)],
    endpoint: options.Endpoint = None,
    namespace: options.Namespace = None,
    json: options.Json = False,
) -> None:
    """Delete the schedule of a recipe; a running retraining continues."""
    with options.answer(json):
        endpoint = options.require_endpoint(endpoint)
        from baton.kubeflow import submit as kubeflow

        schedules = kubeflow.delete_schedules(endpoint, name, namespace)
        if json:
            options.print_json({"deleted": [asdict(each) for each in schedules]})
        else:
            typer.echo(f"{name}: schedule deleted")


def ci_report(
    recipe: options.RecipePath,
    run_id: Annotated[
        str | None, typer.Option("--id", help="Id of the Kubeflow run, as `baton kfp submit` prints it.")
    ] = None,
    result: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Instead of --id: output of `baton kfp submit --wait --json`."),
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Summarize a run as a PR comment, in Markdown.

    Exit code: 0 for a run that succeeded, was promoted or had nothing to do. 3 for a model rejected by the gate, else
    that of the failure.
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


app.command("compile")(compile_recipe)
app.command()(submit)
app.command("heal")(heal_runs)
app.command()(schedule)
app.command("schedules")(list_schedules)
app.command("unschedule")(delete_schedule)
app.command("summary")(ci_report)
schedules_app.command("list")(list_schedules)
schedules_app.command("delete")(delete_schedule)


def _submitted(result: str) -> options.RunAnswer:
    remedy = "Give the file that `baton kfp submit --wait --json > FILE` writes."
    try:
        with open(result, encoding="utf-8") as file:
            text = file.read()
        if not text.strip():
            return options.RunAnswer(state="failed", error="No reason given.")
        submitted: options.RunAnswer = TypeAdapter(options.RunAnswer).validate_python(load(text), strict=True)
        if "state" not in submitted:
            raise ValueError("it has no state")
        return submitted
    except OSError as error:
        raise UserError(f"--result {result!r} cannot be read: {error.strerror}.", remedy=remedy) from None
    except ValueError as error:  # no UTF-8, no JSON, or values of another kind
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise UserError(
            f"--result {result!r} is not output of `baton kfp submit --json`: {reason}.", remedy=remedy
        ) from None


def _kept(storage: Storage, name: str, run_id: str) -> Retraining:
    path = f"models/{name}/outcomes/{run_id}.json"
    try:
        return Retraining.read(loads(storage.read(path)))
    except FileNotFoundError:
        raise UserError(
            f"{storage.uri(path)} does not exist; expected the result of retraining {run_id!r}.",
            remedy="Check the id and the store, and that the run has ended.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{storage.uri(path)} is damaged: no result of a retraining.") from None


def _of_run(storage: Storage, recipe: Recipe, submitted: options.RunAnswer) -> Retraining:
    """Returns a run's state as Kubeflow has it, with figures where the store can be read."""
    came_to = Retraining(submitted["state"], submitted.get("error", ""), now(), run=submitted.get("run"))
    if came_to.run is None or came_to.state not in ("succeeded", "rejected"):
        return came_to
    run = Run(storage, prepare.last_run_name(recipe, came_to.run))
    try:
        evaluation, exported, page = run.read(EvaluationResult), run.read(ExportedModel), run.read(ReportPage)
        paid = bill(run)
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
        bill=paid.words if paid else None,
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
    if outcome.bill:
        lines += ["", f"Cost {outcome.bill}."]
    lines += ["", *(f"- {what}: `{uri}`" for what, uri in links(outcome))]
    lines += [f"- Kubeflow: {submitted['url']}"] if "url" in submitted else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()


def _plain(message: str | None) -> str:
    return " ".join((message or "no message from its pod").split()).replace("`", "'")


def links(outcome: Retraining) -> list[tuple[str, str]]:
    """Returns the addresses of a run's results, each with its name."""
    links = (("run", outcome.run_uri), ("model", outcome.model_uri), ("report", outcome.report_uri))
    return [(what, uri) for what, uri in links if uri]
