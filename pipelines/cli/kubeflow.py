"""`baton submit`, `status`, `cancel` and `retry`: runs on Kubeflow Pipelines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.links import KUBEFLOW_PAGE
from baton.components.shared.runs.run import check_name
from baton.pipelines.cli import options
from baton.pipelines.cli.display import console
from baton.pipelines.cli.options import REJECTED, Output, OutputOption, print_json, reported
from baton.pipelines.compiling import prepare
from baton.pipelines.compiling.package import Pipeline, packaged
from baton.pipelines.kubeflow import capacity

if TYPE_CHECKING:
    from baton.pipelines.kubeflow.api import Run
    from baton.pipelines.kubeflow.endpoint import Client
    from baton.pipelines.kubeflow.run_view import View

GivenRun = Annotated[str, typer.Argument(metavar="RUN", help="Name or id of the run.", show_default=False)]
NAMED_BY = {Pipeline.finetune: "run_name", Pipeline.sweep: "sweep_name"}
"""Pipeline → its parameter for the name."""
EXIT_CODES = {"failed": 1, "canceled": 1, "skipped": 1, "rejected": REJECTED}
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
    sweep_uri: str
    stages: list[StageShown]
    failed: list[Failed]


def submit(
    recipe: options.RecipePath,
    endpoint: options.Endpoint,
    experiment: options.Experiment = None,
    wait: options.Wait = False,
    timeout: options.Timeout = options.WEEK_H,
    namespace: options.Namespace = None,
    service_account: options.ServiceAccount = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Let Kubeflow skip stages that this run has finished before.")
    ] = True,
    overrides: options.Overrides = None,
    store: options.Store = None,
    run_name: options.RunName = None,
    chunks: options.ChunkCount = None,
    image: options.Image = None,
    pipeline: options.PipelineOption = Pipeline.finetune,
    output: OutputOption = Output.text,
) -> None:
    """Uploads a recipe's pipeline to Kubeflow, starts a run and prints its page.

    A bearer token is read from BATON_KFP_TOKEN or KF_PIPELINES_TOKEN. With --wait the exit code is 1
    where the run fails, and 3 where the recipe's gate rejects the model.
    """
    with reported(output):
        from baton.pipelines.kubeflow import endpoint as connection
        from baton.pipelines.kubeflow import submit as kubeflow

        loaded = load_for_pods(recipe, overrides, store, chunks, image)
        name = check_name(run_name or prepare.new_run_name(loaded))
        with packaged(_for_pods(loaded, endpoint, namespace, pipeline), loaded.name, pipeline) as package:
            submission = kubeflow.submit(
                package,
                endpoint,
                experiment=experiment or loaded.name,
                run_name=name,
                arguments={NAMED_BY[pipeline]: name} if pipeline in NAMED_BY else {},
                token=connection.token(),
                namespace=namespace,
                service_account=service_account,
                cache=cache,
            )
        console.print(f"started [bold]{name}[/]: {submission.url}", soft_wrap=True)
        shown: Shown = {"run": name, "run_id": submission.run_id, "url": submission.url, "state": "submitted"}
        if pipeline is Pipeline.sweep:
            shown["sweep_uri"] = f"{loaded.store.uri.rstrip('/')}/sweeps/{name}"
            console.print(f"its trials: baton sweep status {shown['sweep_uri']}", soft_wrap=True)
        if wait:
            shown |= _followed(endpoint, submission.run_id, name, namespace, timeout)
        _end(shown, output)


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
            shown = _shown(endpoint, remote, remote.state or "pending")
            _end(shown | _followed(endpoint, remote.run_id, run, namespace, timeout), output)
            return
        view = store_view.explained(client, remote)
        shown = _shown(endpoint, remote, run_view.outcome(remote.state, view.stages))
        if output is Output.text:
            console.print(f"[bold]{remote.display_name}[/]: {shown['state']}")
            console.print(follow.table(view.stages, is_over=remote.state in FINAL_STATES))
        shown["stages"] = [
            {"name": s.name, "state": s.state.lower(), "seconds": s.seconds, "message": s.message} for s in view.stages
        ]
        if view.is_frozen:
            console.print(run_view.FROZEN, soft_wrap=True)
        _advise(view, remote.run_id)
        _end(shown, output)


def cancel(
    run: GivenRun, endpoint: options.Endpoint, namespace: options.Namespace = None, output: OutputOption = Output.text
) -> None:
    """Ends a run on Kubeflow. What its newest checkpoint holds is kept, and `baton retry` resumes from there."""
    with reported(output):
        from baton.pipelines.kubeflow.submit import FINAL_STATES

        client, remote = _found(endpoint, run, namespace)
        if remote.state in FINAL_STATES:
            raise UserError(
                f"run '{remote.display_name}' is {remote.state.lower()} already; expected one that still runs.",
            )
        client.terminate_run(remote.run_id)
        _end(_shown(endpoint, remote, "canceling"), output)


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
        client, remote = _found(endpoint, run, namespace)
        name = remote.display_name
        if remote.state not in ("FAILED", "CANCELED"):
            state = (remote.state or "pending").lower()
            raise UserError(f"run '{name}' is {state}; expected one that has failed or was cancelled.")
        try:
            client.retry_run(remote.run_id)
        except BatonError as error:
            raise BatonError(
                f"Kubeflow cannot retry run '{name}': {error}",
                remedy=f"`baton submit RECIPE --run {name}` starts it anew, from its newest checkpoint.",
            ) from None
        console.print(f"[bold]{name}[/] resumes")
        shown = _shown(endpoint, remote, "retried")
        if wait:
            shown |= _followed(endpoint, remote.run_id, name, namespace, timeout)
        _end(shown, output)


def load_for_pods(
    recipe: str, overrides: Sequence[str] | None, store: str | None, chunks: int | None, image: str | None
) -> Recipe:
    """Reads a recipe with the command line's changes, and tells what will not work in pods; see `prepare.load`."""
    loaded = prepare.load(recipe, overrides or (), store=store, chunks=chunks, image=image, here=False)
    for warning in prepare.cluster_warnings(loaded):
        console.print(f"[yellow]note:[/] {warning}")
    return loaded


def _for_pods(recipe: Recipe, endpoint: str, namespace: str | None, pipeline: Pipeline) -> Recipe:
    """Returns the recipe as its pods get it."""
    recipe = prepare.for_cluster(_with_page(recipe, endpoint))
    return capacity.fitted(recipe, namespace, console.print) if pipeline is Pipeline.sweep else recipe


def _with_page(recipe: Recipe, endpoint: str) -> Recipe:
    """Returns the recipe with the address of the Kubeflow page in the pods' environment, for links from MLflow."""
    page = os.environ.get(KUBEFLOW_PAGE) or endpoint
    is_private = "://localhost" in page or "://127." in page
    if is_private or KUBEFLOW_PAGE in recipe.resources.env:
        return recipe
    env = {**recipe.resources.env, KUBEFLOW_PAGE: page}
    return recipe.model_copy(update={"resources": recipe.resources.model_copy(update={"env": env})})


def _found(endpoint: str, run: str, namespace: str | None) -> tuple[Client, Run]:
    """Returns kfp's client and the run, and says so where several have its name."""
    from baton.pipelines.kubeflow import endpoint as connection
    from baton.pipelines.kubeflow.find_run import find

    client = connection.connect(endpoint, token=connection.token(), namespace=namespace)
    newest, count = find(client, endpoint, run, namespace)
    if count > 1:
        console.print(f"{count} runs are named {run}; this is the newest, {newest.run_id}", soft_wrap=True)
    return client, newest


def _shown(endpoint: str, run: Run, state: str) -> Shown:
    from baton.pipelines.kubeflow.submit import run_url

    return {"run": run.display_name, "run_id": run.run_id, "url": run_url(endpoint, run.run_id), "state": state}


def _followed(endpoint: str, run_id: str, name: str, namespace: str | None, hours: float) -> Shown:
    """Waits for a run and returns its state, and what failed."""
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
        typer.secho(f"baton: the run continues; `baton status {name} --wait` follows it again", err=True)
        raise typer.Exit(130) from None
    failed = [stage for stage in follow.view.stages if stage.state == "FAILED"]
    _advise(follow.view, run_id)
    shown: Shown = {"state": run_view.outcome(state, follow.view.stages)}
    if failed:
        shown["failed"] = [
            {"stage": stage.name, "message": stage.message, "exit_code": stage.exit_code} for stage in failed
        ]
    return shown


def _advise(view: View, run_id: str) -> None:
    """Says what there is to say of the run, and of each stage that failed or cannot start what helps."""
    if view.message:
        console.print(view.message, soft_wrap=True, markup=False)
    for stage in view.stages:
        if stage.hint:
            console.print(f"{stage.name}: {stage.hint}", soft_wrap=True, markup=False)
        if stage.state == "FAILED":
            log = stage.pod or f"-l pipeline/runid={run_id},app.kubernetes.io/component={stage.component_name}"
            console.print(f"{stage.name}: its log: kubectl logs {log} -c main", soft_wrap=True, markup=False)


def _end(shown: Shown, output: Output) -> None:
    """Prints what is asked for, and ends with the exit code of the run's state."""
    print_json(shown) if output is Output.json else typer.echo(shown["url"])
    if code := EXIT_CODES.get(shown["state"]):
        raise typer.Exit(code)
