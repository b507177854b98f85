"""`baton submit`, `status`, `cancel`, `retry`, `schedule` and `schedules`: runs on Kubeflow, and following them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from typing_extensions import TypedDict

from baton import api
from baton.cli import options
from baton.cli.display import answer, console, note, screen
from baton.cli.options import INTERRUPTED, REJECTED, Output, OutputOption, print_json, reported
from baton.compiler.pipeline_file import Pipeline
from baton.errors import BatonError, UserError
from baton.recipe.recipe import Recipe
from baton.terminal import Terminal, visible

if TYPE_CHECKING:
    from baton.kubeflow.connection import Client, KubeflowRun
    from baton.kubeflow.run_status import RunStatus, StageStatus
    from baton.kubeflow.submit import Submission


# --- Following a run on Kubeflow to its end, and what is told of it then.


UNKNOWN = "unknown"
"""State of a run that could not be followed to its end."""
EXIT_CODES = {"failed": 1, "canceled": 1, "skipped": 1, "rejected": REJECTED, UNKNOWN: 4}
"""By the state of a run; 0 where it has succeeded or still runs."""


class StageShown(TypedDict):
    """A stage, for `--output json`."""

    name: str
    state: str
    seconds: float | None
    message: str | None


class Failed(TypedDict):
    """A stage that failed, for `--output json`."""

    stage: str
    message: str | None
    exit_code: int | None
    """What the stage ended with; None where its pod was lost."""


class Shown(TypedDict, total=False):
    """A run, for `--output json`."""

    run: str
    run_id: str
    url: str
    state: str
    pipeline: str
    version: str
    """Names of the registered pipeline and of the version that the run was started from."""
    sweep_uri: str
    stages: list[StageShown]
    failed: list[Failed]
    error: str
    """Why the command failed, in place of all else; beside the run where it could not be followed to its end."""
    exit_code: int


def describe_run(endpoint: str, run: KubeflowRun, state: str) -> Shown:
    """Returns what is told of a run first."""
    from baton.kubeflow.submit import run_url

    return {"run": run.display_name, "run_id": run.run_id, "url": run_url(endpoint, run.run_id), "state": state}


def follow_to_end(
    endpoint: str, run_id: str, name: str, namespace: str | None, hours: float
) -> tuple[Shown, RunStatus]:
    """Waits for a run and returns its state with what failed, and the run as it ended.

    Where it cannot be followed any more the state is `UNKNOWN`, with the reason: the run itself goes on.
    """
    from baton.cli.kubeflow_display import Follow
    from baton.kubeflow import connection, run_status
    from baton.kubeflow import submit as kubeflow

    try:
        with Follow() as follow:
            state = kubeflow.wait(
                endpoint,
                run_id,
                timeout_s=hours * 3600,
                on_state=lambda run, now: console.print(f"{run}: {now.lower()}"),
                on_run=follow.seen,
                token=connection.token(),
                namespace=namespace,
                poll_s=kubeflow.POLL_S,
            )
    except KeyboardInterrupt:
        return _unfollowed("interrupted", name, namespace, INTERRUPTED), follow.view
    except BatonError as error:
        return _unfollowed(str(error), name, namespace), follow.view
    failed = [stage for stage in follow.view.stages if stage.state == "FAILED"]
    advise(follow.view, run_id)
    ended: Shown = {"state": run_status.outcome(state, follow.view.stages)}
    if ended["state"] in ("failed", "canceled"):
        try:
            client = connection.connect(endpoint, token=connection.token(), namespace=namespace)
            conclude(client, client.get_run(run_id), follow.view.stages, ended["state"])
        except BatonError as error:  # how it ended is known
            console.print(f"what it has left is not put in order: {error}", soft_wrap=True, markup=False)
    if failed:
        ended["failed"] = [
            {"stage": stage.name, "message": stage.message, "exit_code": stage.exit_code} for stage in failed
        ]
    return ended, follow.view


def _unfollowed(reason: str, name: str, namespace: str | None, exit_code: int = EXIT_CODES[UNKNOWN]) -> Shown:
    """Says that a run goes on which is not followed any more, and how to follow it, and returns what is known."""
    where = f" --namespace {namespace}" if namespace else ""
    typer.secho(f"baton: {visible(reason)}", err=True, fg=typer.colors.RED)
    typer.secho(f"baton: the run continues; `baton status {name}{where} --wait` follows it again", err=True)
    return {"state": UNKNOWN, "error": reason, "exit_code": exit_code}


def with_retries(
    endpoint: str,
    submission: Submission,
    post: Callable[[], Submission],
    namespace: str | None,
    hours: float,
    retries: int,
) -> Shown:
    """Waits for a run, starts it again where a pod was lost, and returns how the last one ended.

    Args:
        endpoint: Address of the Kubeflow Pipelines API.
        submission: The run.
        post: Submits it once more under its name, where the backend cannot start its failed stages again.
        namespace: The user's namespace on a multi-user Kubeflow.
        hours: How long to wait for each.
        retries: How often to start it again.
    """
    from baton.kubeflow import connection
    from baton.kubeflow.connection import AwayError, RefusedError
    from baton.kubeflow.submit import resume

    name = submission.run_name
    for attempt in itertools.count(1):
        ended, view = follow_to_end(endpoint, submission.run_id, name, namespace, hours)
        if ended["state"] != "failed" or not view.is_lost or attempt > retries:
            break
        console.print(f"{name}: a pod was lost, it starts again ({attempt} of {retries})", soft_wrap=True)
        try:
            resume(connection.connect(endpoint, token=connection.token(), namespace=namespace), submission.run_id)
        except KeyboardInterrupt:
            ended = _unfollowed("interrupted", name, namespace, INTERRUPTED)
            break
        except (AwayError, RefusedError) as error:  # nobody knows whether it has been started
            ended = _unfollowed(str(error), name, namespace)
            break
        except BatonError:  # the backend cannot
            try:
                submission = post()
            except BatonError as error:
                typer.secho(f"baton: {visible(str(error))}", err=True, fg=typer.colors.RED)
                ended["error"] = str(error)
                break
            console.print(f"started [bold]{name}[/]: {submission.url}", soft_wrap=True)
    return {**ended, "run_id": submission.run_id, "url": submission.url}


def advise(view: RunStatus, run_id: str, out: Terminal = console) -> None:
    """Says what there is to say of the run, and of each stage that failed or cannot start what helps."""
    if view.message:
        out.print(view.message, soft_wrap=True, markup=False)
    for stage in view.stages:
        if stage.hint:
            out.print(f"{stage.name}: {stage.hint}", soft_wrap=True, markup=False)
        if stage.state == "FAILED":
            label = "" if stage.is_own else f",app.kubernetes.io/component={stage.component_name}"
            log = stage.pod or f"-l pipeline/runid={run_id}{label}"
            out.print(f"{stage.name}: its log: kubectl logs {log} -c main", soft_wrap=True, markup=False)


def conclude(client: Client, run: KubeflowRun, stages: list[StageStatus], state: str) -> None:
    """Ends what a run that has failed or was cancelled has left running in MLflow, keeps why it did, and says so."""
    from baton.kubeflow import failures

    for line in (*failures.end_mlflow_runs(client, run, state), failures.record_failure(client, run, stages, state)):
        if line:
            console.print(line, soft_wrap=True, markup=False)


def end_command(told: Shown, output: Output) -> None:
    """Prints what is asked for, and ends with the exit code of the run's state."""
    print_json(told) if output is Output.json else typer.echo(told["url"])
    if code := told.get("exit_code") or EXIT_CODES.get(told["state"]):
        raise typer.Exit(code)


# --- `baton submit`: a recipe becomes a run on Kubeflow Pipelines.


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
    output: OutputOption = Output.text,
) -> None:
    """Uploads a recipe's pipeline to Kubeflow, starts a run and prints its page.

    A bearer token is read from BATON_KFP_TOKEN or KF_PIPELINES_TOKEN. With --wait the exit code is 1 where the run
    fails, 3 where the gate rejects the model.
    """
    with reported(output):
        loaded = load_for_pods(recipe, overrides, store, chunks, image)
        post = api.submitting(
            loaded,
            endpoint,
            run_name,
            pipeline=pipeline,
            experiment=experiment,
            namespace=namespace,
            service_account=service_account,
            cache=cache,
            registers=registers,
            tell=note,
        )
        shown = _started(loaded, endpoint, submission := post(), pipeline)
        if wait:
            shown |= with_retries(endpoint, submission, post, namespace, timeout, retries)
        end_command(shown, output)


def _started(recipe: Recipe, endpoint: str, submission: Submission, pipeline: Pipeline) -> Shown:
    """Says where a run and its pipeline are to be seen, and returns the run."""
    from baton.kubeflow import submit as registry

    name, url = submission.run_name, submission.url
    console.print(f"started [bold]{name}[/]: {url}", soft_wrap=True)
    shown: Shown = {"run": name, "run_id": submission.run_id, "url": url, "state": "submitted"}
    if version := submission.registered:
        shown |= {"pipeline": version.pipeline, "version": version.version}
        known = "new" if version.is_new else "as before"
        console.print(f"its pipeline, {known}: {registry.version_url(endpoint, version)}", soft_wrap=True)
    if pipeline is Pipeline.sweep:
        shown["sweep_uri"] = f"{recipe.store.uri.rstrip('/')}/sweeps/{name}"
        console.print(f"its trials: baton sweep status {shown['sweep_uri']}", soft_wrap=True)
    return shown


def load_for_pods(
    recipe: str, overrides: Sequence[str] | None, store: str | None, chunks: int | None, image: str | None
) -> Recipe:
    """Reads a recipe with the command line's changes, and tells what will not work in pods; see `prepare.load`."""
    return api.load_for_pods(recipe, overrides or (), store, chunks, image, tell=note).recipe


# --- `baton status`, `cancel` and `retry`: runs on Kubeflow Pipelines.


GivenRun = Annotated[str, typer.Argument(metavar="RUN", help="Name or id of the run.", show_default=False)]


def status(
    run: GivenRun,
    endpoint: options.Endpoint,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    namespace: options.Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """Shows a run on Kubeflow: each stage, and why one failed or does not start.

    The exit code is 0 where the run has succeeded or still runs, 1 where it has failed or was
    cancelled, and 3 where its gate rejected the model.
    """
    with reported(output):
        from baton.cli import kubeflow_display
        from baton.kubeflow import run_status
        from baton.kubeflow.submit import FINAL_STATES

        client, remote = _found(endpoint, run, namespace)
        if wait:
            shown = describe_run(endpoint, remote, remote.state or "pending")
            ended, _ = follow_to_end(endpoint, remote.run_id, run, namespace, timeout)
            end_command(shown | ended, output)
            return
        view = run_status.explained_by_store(client, remote, run_status.stages(client, remote))
        shown = describe_run(endpoint, remote, run_status.outcome(remote.state, view.stages))
        out = screen() if output is Output.text else console
        if output is Output.text:
            out.print(f"[bold]{escape(remote.display_name)}[/]: {shown['state']}", soft_wrap=True)
            answer(kubeflow_display.table(view.stages, is_over=remote.state in FINAL_STATES))
        shown["stages"] = [
            {"name": s.name, "state": s.state.lower(), "seconds": s.seconds, "message": s.message} for s in view.stages
        ]
        if view.is_frozen:
            out.print(run_status.FROZEN, soft_wrap=True)
        advise(view, remote.run_id, out)
        if remote.state in FINAL_STATES:
            conclude(client, remote, view.stages, shown["state"])
        end_command(shown, output)


def cancel(
    run: GivenRun, endpoint: options.Endpoint, namespace: options.Namespace = None, output: OutputOption = Output.text
) -> None:
    """Ends a run on Kubeflow. What its newest checkpoint holds is kept, and `baton retry` resumes from there."""
    with reported(output):
        from baton.kubeflow import run_status
        from baton.kubeflow.submit import FINAL_STATES

        client, remote = _found(endpoint, run, namespace)
        if remote.state in FINAL_STATES:
            raise UserError(
                f"run '{remote.display_name}' is {remote.state.lower()} already; expected one that still runs.",
            )
        stages = run_status.stages(client, remote)
        client.terminate_run(remote.run_id)
        conclude(client, remote, stages, "canceled")
        end_command(describe_run(endpoint, remote, "canceling"), output)


def retry(
    run: GivenRun,
    endpoint: options.Endpoint,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    namespace: options.Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """Starts the failed stages of a run on Kubeflow again. Training resumes from the newest checkpoint."""
    with reported(output):
        from baton.kubeflow import run_status
        from baton.kubeflow.connection import AwayError, RefusedError
        from baton.kubeflow.submit import resume

        client, remote = _found(endpoint, run, namespace)
        name = remote.display_name
        if remote.state not in ("FAILED", "CANCELED"):
            state = (remote.state or "pending").lower()
            raise UserError(f"run '{name}' is {state}; expected one that has failed or was cancelled.")
        try:
            resume(client, remote.run_id)
        except (AwayError, RefusedError):  # whether it resumes is not known
            raise
        except BatonError as error:
            stages = run_status.explained_by_store(client, remote, run_status.stages(client, remote)).stages
            conclude(client, remote, stages, run_status.outcome(remote.state, stages))
            raise BatonError(
                f"Kubeflow cannot retry run '{name}': {error}",
                remedy=f"`baton submit RECIPE --run {name}` starts it anew, from its newest checkpoint.",
            ) from None
        console.print(f"[bold]{name}[/] resumes")
        shown = describe_run(endpoint, remote, "retried")
        if wait:
            shown |= follow_to_end(endpoint, remote.run_id, name, namespace, timeout)[0]
        end_command(shown, output)


def _found(endpoint: str, run: str, namespace: str | None) -> tuple[Client, KubeflowRun]:
    """Returns kfp's client and the run, and says so where several have its name."""
    from baton.kubeflow import connection
    from baton.kubeflow.run_status import find_run

    client = connection.connect(endpoint, token=connection.token(), namespace=namespace)
    newest, count = find_run(client, endpoint, run, namespace)
    if count > 1:
        console.print(f"{count} runs are named {run}; this is the newest, {newest.run_id}", soft_wrap=True)
    return client, newest


def add_run_commands(app: typer.Typer) -> None:
    """Adds the commands that act on runs on Kubeflow Pipelines."""
    for command in (submit, status, cancel, retry):
        app.command()(command)


# --- `baton schedule` and `baton schedules`: retraining by the clock, as a recurring run of Kubeflow Pipelines.


app = typer.Typer(help="Retraining by the clock.", no_args_is_help=True)


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
    output: OutputOption = Output.text,
) -> None:
    """Retrains a recipe's model by the clock, where its data or the recipe have changed.

    It takes the place of an earlier schedule of the recipe. The times are those of Kubeflow's clock: UTC, unless its
    administrator has set another.
    """
    with reported(output):
        from baton.kubeflow import connection
        from baton.kubeflow import schedule as recurring

        line = recurring.cron_line(cron)
        loaded = load_for_pods(recipe, overrides, store, chunks, image)
        with api.packaged_for(loaded, endpoint, Pipeline.retrain, note) as package:
            made = recurring.create(
                package,
                endpoint,
                recipe=loaded.name,
                cron=line,
                token=connection.token(),
                namespace=namespace,
                service_account=service_account,
                registers=registers,
                tell=note,
            )
        if output is Output.json:
            print_json(asdict(made))
        else:
            typer.echo(f"{made.recipe} is retrained at '{made.cron}' ({made.identifier})")
            typer.echo(f"times are those of Kubeflow's clock: {recurring.CLOCK}")


@app.command("list")
def list_command(
    endpoint: options.Endpoint, namespace: options.Namespace = None, output: OutputOption = Output.text
) -> None:
    """Lists the schedules that there are."""
    with reported(output):
        from baton.kubeflow import connection
        from baton.kubeflow import schedule as recurring

        schedules = recurring.find(endpoint, token=connection.token(), namespace=namespace)
        if output is Output.json:
            print_json({"schedules": [asdict(each) for each in schedules]})
            return
        for each in schedules:
            state = "enabled" if each.is_enabled else "disabled"
            typer.echo(f"{each.recipe}\t{each.cron}\t{state}\t{each.identifier}")
        if schedules:
            typer.echo(f"times: {recurring.CLOCK}", err=True)


@app.command("delete")
def delete_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.", show_default=False)],
    endpoint: options.Endpoint,
    namespace: options.Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """Deletes the schedule of a recipe; a run that is under way continues."""
    with reported(output):
        from baton.kubeflow import connection
        from baton.kubeflow import schedule as recurring

        schedules = recurring.delete(endpoint, name, token=connection.token(), namespace=namespace)
        if output is Output.json:
            print_json({"deleted": [asdict(each) for each in schedules]})
        else:
            typer.echo(f"{name} is not retrained by the clock any more")
