"""`baton submit`: a recipe becomes a run on Kubeflow Pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.components.shared.recipe import Recipe
from baton.pipelines.api import cluster
from baton.pipelines.cli import following, options
from baton.pipelines.cli.display import console, note
from baton.pipelines.cli.following import Shown
from baton.pipelines.cli.options import Output, OutputOption, reported
from baton.pipelines.compiling.package import Pipeline

if TYPE_CHECKING:
    from baton.pipelines.kubeflow.submit import Submission


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
        post = cluster.submitting(
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
            shown |= following.with_retries(endpoint, submission, post, namespace, timeout, retries)
        following.end(shown, output)


def _started(recipe: Recipe, endpoint: str, submission: Submission, pipeline: Pipeline) -> Shown:
    """Says where a run and its pipeline are to be seen, and returns the run."""
    from baton.pipelines.kubeflow import registry

    name, url = submission.run_name, submission.url
    console.print(f"started [bold]{name}[/]: {url}", soft_wrap=True)
    shown: Shown = {"run": name, "run_id": submission.run_id, "url": url, "state": "submitted"}
    if version := submission.registered:
        shown |= {"pipeline": version.pipeline, "version": version.version}
        known = "new" if version.is_new else "as before"
        console.print(f"its pipeline, {known}: {registry.url(endpoint, version)}", soft_wrap=True)
    if pipeline is Pipeline.sweep:
        shown["sweep_uri"] = f"{recipe.store.uri.rstrip('/')}/sweeps/{name}"
        console.print(f"its trials: baton sweep status {shown['sweep_uri']}", soft_wrap=True)
    return shown


def load_for_pods(
    recipe: str, overrides: Sequence[str] | None, store: str | None, chunks: int | None, image: str | None
) -> Recipe:
    """Reads a recipe with the command line's changes, and tells what will not work in pods; see `prepare.load`."""
    return cluster.load_for_pods(recipe, overrides or (), store, chunks, image, tell=note).recipe
