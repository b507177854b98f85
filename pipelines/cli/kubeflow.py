"""`baton status`, `cancel` and `retry`: runs on Kubeflow Pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from baton.components.shared.core.errors import BatonError, UserError
from baton.pipelines.cli import following, options
from baton.pipelines.cli.display import answer, console, screen
from baton.pipelines.cli.options import Output, OutputOption, reported
from baton.pipelines.cli.submit import submit

if TYPE_CHECKING:
    from baton.pipelines.kubeflow.api import Run
    from baton.pipelines.kubeflow.endpoint import Client

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
        from baton.pipelines.cli import follow
        from baton.pipelines.kubeflow import run_view, store_view
        from baton.pipelines.kubeflow.submit import FINAL_STATES

        client, remote = _found(endpoint, run, namespace)
        if wait:
            shown = following.shown(endpoint, remote, remote.state or "pending")
            ended, _ = following.followed(endpoint, remote.run_id, run, namespace, timeout)
            following.end(shown | ended, output)
            return
        view = store_view.explained(client, remote, run_view.stages(client, remote))
        shown = following.shown(endpoint, remote, run_view.outcome(remote.state, view.stages))
        out = screen() if output is Output.text else console
        if output is Output.text:
            out.print(f"[bold]{escape(remote.display_name)}[/]: {shown['state']}", soft_wrap=True)
            answer(follow.table(view.stages, is_over=remote.state in FINAL_STATES))
        shown["stages"] = [
            {"name": s.name, "state": s.state.lower(), "seconds": s.seconds, "message": s.message} for s in view.stages
        ]
        if view.is_frozen:
            out.print(run_view.FROZEN, soft_wrap=True)
        following.advise(view, remote.run_id, out)
        if remote.state in FINAL_STATES:
            following.conclude(client, remote, view.stages, shown["state"])
        following.end(shown, output)


def cancel(
    run: GivenRun, endpoint: options.Endpoint, namespace: options.Namespace = None, output: OutputOption = Output.text
) -> None:
    """Ends a run on Kubeflow. What its newest checkpoint holds is kept, and `baton retry` resumes from there."""
    with reported(output):
        from baton.pipelines.kubeflow import run_view
        from baton.pipelines.kubeflow.submit import FINAL_STATES

        client, remote = _found(endpoint, run, namespace)
        if remote.state in FINAL_STATES:
            raise UserError(
                f"run '{remote.display_name}' is {remote.state.lower()} already; expected one that still runs.",
            )
        stages = run_view.stages(client, remote)
        client.terminate_run(remote.run_id)
        following.conclude(client, remote, stages, "canceled")
        following.end(following.shown(endpoint, remote, "canceling"), output)


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
        from baton.pipelines.kubeflow import run_view, store_view
        from baton.pipelines.kubeflow.submit import resume
        from baton.pipelines.kubeflow.transport import AwayError, RefusedError

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
            stages = store_view.explained(client, remote, run_view.stages(client, remote)).stages
            following.conclude(client, remote, stages, run_view.outcome(remote.state, stages))
            raise BatonError(
                f"Kubeflow cannot retry run '{name}': {error}",
                remedy=f"`baton submit RECIPE --run {name}` starts it anew, from its newest checkpoint.",
            ) from None
        console.print(f"[bold]{name}[/] resumes")
        shown = following.shown(endpoint, remote, "retried")
        if wait:
            shown |= following.followed(endpoint, remote.run_id, name, namespace, timeout)[0]
        following.end(shown, output)


def _found(endpoint: str, run: str, namespace: str | None) -> tuple[Client, Run]:
    """Returns kfp's client and the run, and says so where several have its name."""
    from baton.pipelines.kubeflow import endpoint as connection
    from baton.pipelines.kubeflow.find_run import find

    client = connection.connect(endpoint, token=connection.token(), namespace=namespace)
    newest, count = find(client, endpoint, run, namespace)
    if count > 1:
        console.print(f"{count} runs are named {run}; this is the newest, {newest.run_id}", soft_wrap=True)
    return client, newest


def add_to(app: typer.Typer) -> None:
    """Adds the commands that act on runs on Kubeflow Pipelines."""
    for command in (submit, status, cancel, retry):
        app.command()(command)
