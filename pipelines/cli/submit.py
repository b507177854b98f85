"""`baton submit`: a recipe becomes a run on Kubeflow Pipelines."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.links import KUBEFLOW_PAGE
from baton.pipelines.cli import following, options
from baton.pipelines.cli.display import console
from baton.pipelines.cli.following import Shown
from baton.pipelines.cli.options import Output, OutputOption, reported
from baton.pipelines.compiling import fits, prepare, rendering, resumable
from baton.pipelines.compiling.package import Pipeline, packaged
from baton.pipelines.kubeflow import capacity

if TYPE_CHECKING:
    from baton.pipelines.kubeflow.submit import Submission

NAMED_BY = {Pipeline.finetune: ("run_name",), Pipeline.sweep: ("sweep_name",), Pipeline.retrain: ()}
"""Pipeline → its parameters for the name."""


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
        from baton.pipelines.kubeflow import endpoint as connection
        from baton.pipelines.kubeflow import submit as kubeflow

        loaded = load_for_pods(recipe, overrides, store, chunks, image)
        name = resumable.named(loaded, run_name)
        with packaged_to_fit(_for_pods(loaded, endpoint, namespace, pipeline), loaded.name, pipeline) as package:
            post = functools.partial(
                kubeflow.submit,
                package,
                endpoint,
                experiment=experiment or loaded.name,
                run_name=name,
                arguments=dict.fromkeys(NAMED_BY[pipeline], name),
                token=connection.token(),
                namespace=namespace,
                service_account=service_account,
                cache=cache,
                registers=registers,
            )
            shown = _started(loaded, endpoint, submission := post(), pipeline)
            _tell_losses(endpoint, namespace)
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


def _tell_losses(endpoint: str, namespace: str | None) -> None:
    """Says once which losses of a pod end a run there, and what helps."""
    from baton.pipelines.kubeflow import losses

    if loss := losses.not_told_yet(endpoint, namespace):
        console.print(f"[yellow]note:[/] {loss}. {losses.APPLY}, or add --wait --retries 3", soft_wrap=True)


def load_for_pods(
    recipe: str, overrides: Sequence[str] | None, store: str | None, chunks: int | None, image: str | None
) -> Recipe:
    """Reads a recipe with the command line's changes, and tells what will not work in pods; see `prepare.load`."""
    loaded = prepare.load(recipe, overrides or (), store=store, chunks=chunks, image=image, here=False)
    rendering.check(loaded)
    for warning in prepare.cluster_warnings(loaded):
        console.print(f"[yellow]note:[/] {warning}")
    return loaded


@contextlib.contextmanager
def packaged_to_fit(recipe: Recipe, name: str, pipeline: Pipeline) -> Iterator[str]:
    """Yields the path of a recipe's package, and tells from where on Kubeflow's record of the run cannot be read.

    Raises:
        UserError: the workflow would be too large to end.
    """
    with packaged(recipe, name, pipeline) as package:
        if note := fits.frozen_note(fits.check_fits(package, recipe, pipeline)):
            console.print(f"[yellow]note:[/] {note}")
        yield package


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
