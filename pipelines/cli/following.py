"""Following a run on Kubeflow to its end, and what is told of it then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer
from typing_extensions import TypedDict  # typing's own cannot be checked by pydantic before Python 3.12

from baton.components.shared.core.errors import BatonError
from baton.pipelines.cli.display import console
from baton.pipelines.cli.options import INTERRUPTED, REJECTED, Output, print_json
from baton.pipelines.local.terminal import Terminal, visible

if TYPE_CHECKING:
    from baton.pipelines.kubeflow.api import Run
    from baton.pipelines.kubeflow.endpoint import Client
    from baton.pipelines.kubeflow.run_view import Stage, View
    from baton.pipelines.kubeflow.submit import Submission

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


def shown(endpoint: str, run: Run, state: str) -> Shown:
    """Returns what is told of a run first."""
    from baton.pipelines.kubeflow.submit import run_url

    return {"run": run.display_name, "run_id": run.run_id, "url": run_url(endpoint, run.run_id), "state": state}


def followed(endpoint: str, run_id: str, name: str, namespace: str | None, hours: float) -> tuple[Shown, View]:
    """Waits for a run and returns its state with what failed, and the run as it ended.

    Where it cannot be followed any more the state is `UNKNOWN`, with the reason: the run itself goes on.
    """
    from baton.pipelines.cli.follow import Follow
    from baton.pipelines.kubeflow import endpoint as connection
    from baton.pipelines.kubeflow import run_view
    from baton.pipelines.kubeflow import submit as kubeflow

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
    ended: Shown = {"state": run_view.outcome(state, follow.view.stages)}
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
    from baton.pipelines.kubeflow import endpoint as connection
    from baton.pipelines.kubeflow.submit import resume
    from baton.pipelines.kubeflow.transport import AwayError, RefusedError

    name = submission.run_name
    for attempt in itertools.count(1):
        ended, view = followed(endpoint, submission.run_id, name, namespace, hours)
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


def advise(view: View, run_id: str, out: Terminal = console) -> None:
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


def conclude(client: Client, run: Run, stages: list[Stage], state: str) -> None:
    """Ends what a run that has failed or was cancelled has left running in MLflow, keeps why it did, and says so."""
    from baton.pipelines.kubeflow import ended, tracked

    for line in (*tracked.close(client, run, state), ended.leave_word(client, run, stages, state)):
        if line:
            console.print(line, soft_wrap=True, markup=False)


def end(told: Shown, output: Output) -> None:
    """Prints what is asked for, and ends with the exit code of the run's state."""
    print_json(told) if output is Output.json else typer.echo(told["url"])
    if code := told.get("exit_code") or EXIT_CODES.get(told["state"]):
        raise typer.Exit(code)
