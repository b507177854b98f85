"""Recipes on Kubeflow Pipelines: compiled, and submitted."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.links import KUBEFLOW_PAGE
from baton.pipelines.api.recipes import LoadedRecipe, Overrides, Source, load
from baton.pipelines.compiling import fits, for_pods, rendering, resumable
from baton.pipelines.compiling.package import Pipeline, packaged

if TYPE_CHECKING:
    from baton.pipelines.compiling.workflow_size import WorkflowSize
    from baton.pipelines.kubeflow.submit import Submission

NAMED_BY = {Pipeline.finetune: ("run_name",), Pipeline.sweep: ("sweep_name",), Pipeline.retrain: ()}
"""Pipeline → its parameters for the name."""
Tell = Callable[[str], None]
"""Is told what somebody should know before a run."""


class Terms(TypedDict, total=False):
    """How a run is submitted."""

    experiment: str | None
    """Experiment; the recipe's name when left out."""
    namespace: str | None
    """Kubeflow profile, where there are several."""
    service_account: str | None
    """Service account of the pods."""
    cache: bool
    """Whether Kubeflow skips stages that this run has finished before; it does when left out."""
    registers: bool
    """Whether the pipeline is registered, for Kubeflow's page to start it; it is when left out."""


def untold(line: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Compiled:
    """A compiled recipe.

    Attributes:
        path: The file.
        num_chunks: Train-chunks in it.
        bytes: Its size.
        workflow: How large the workflow on the cluster grows.
        note: What is to be known of that; empty where nothing is.
    """

    path: str
    num_chunks: int
    bytes: int
    workflow: WorkflowSize
    note: str


def load_for_pods(
    recipe: Source | LoadedRecipe,
    overrides: Overrides = (),
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    *,
    tell: Tell = untold,
) -> LoadedRecipe:
    """Reads a recipe that will run in pods, and tells what will not work there; see `load`."""
    loaded = load(recipe, overrides, store=store, chunks=chunks, image=image, here=False)
    rendering.check(loaded.recipe)
    for warning in for_pods.warnings(loaded.recipe):
        tell(warning)
    return loaded


def compile(
    recipe: Source | LoadedRecipe,
    path: str,
    *,
    overrides: Overrides = (),
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    pipeline: str = "finetune",
    picture: str | None = None,
    tell: Tell = untold,
) -> Compiled:
    """Compiles a recipe to a file for `kfp run submit -f` or the Kubeflow page.

    Args:
        recipe: What `load` takes, or has returned.
        path: Where to write it; `.yaml`.
        overrides: Changes to the recipe.
        store: URI instead of the recipe's.
        chunks: Number of chunks instead of the recipe's.
        image: Container image instead of the recipe's.
        pipeline: `finetune`, `retrain` or `sweep`.
        picture: Where to write its graph as Mermaid text; `.mmd`.
        tell: Called with what will not work in pods.

    Raises:
        UserError: a mistake in recipe or path, or the workflow would be too large to end.
    """
    if not path.endswith((".yaml", ".yml")):
        raise UserError(f"output {path!r} has another ending than .yaml.", remedy="Kubeflow takes YAML files.")
    if picture:
        from baton.pipelines.compiling import mermaid

        mermaid.check_ending(picture)
    kind = Pipeline(pipeline)
    loaded = load_for_pods(recipe, overrides, store, chunks, image, tell=tell).recipe
    with packaged(for_pods.settled(loaded), "pipeline", kind) as package:
        size = fits.check_fits(package, loaded, kind)
        if picture:
            mermaid.write(package, picture)
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        shutil.copyfile(package, path)  # last: what is refused is not written
    return Compiled(path, loaded.num_chunks, os.path.getsize(path), size, fits.frozen_note(size))


def submit(
    recipe: Source | LoadedRecipe,
    endpoint: str,
    name: str | None = None,
    *,
    overrides: Overrides = (),
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    pipeline: str = "finetune",
    tell: Tell = untold,
    **terms: Unpack[Terms],
) -> Submission:
    """Uploads a recipe's pipeline to Kubeflow and starts a run; it does not wait for it.

    A bearer token is read from BATON_KFP_TOKEN or KF_PIPELINES_TOKEN.

    Args:
        recipe: What `load` takes, or has returned.
        endpoint: Kubeflow Pipelines API, e.g. `http://localhost:8888`.
        name: The run's name; one that exists resumes where it stopped.
        overrides: Changes to the recipe.
        store: URI instead of the recipe's.
        chunks: Number of chunks instead of the recipe's.
        image: Container image instead of the recipe's.
        pipeline: `finetune`, `retrain` or `sweep`.
        tell: Called with what will not work in pods.
        terms: `experiment`, `namespace`, `service_account`, `cache`, `registers`; see `Terms`.

    Returns:
        The run: `run_id`, `run_name`, `url`.

    Raises:
        UserError: a mistake in recipe, address, token or name.
        BatonError: the endpoint cannot be reached or fails.
    """
    loaded = load_for_pods(recipe, overrides, store, chunks, image, tell=tell)
    return submitting(loaded.recipe, endpoint, name, pipeline=Pipeline(pipeline), tell=tell, **terms)()


def submitting(
    recipe: Recipe,
    endpoint: str,
    name: str | None,
    *,
    pipeline: Pipeline,
    tell: Tell,
    **terms: Unpack[Terms],
) -> Callable[[], Submission]:
    """Returns what submits a recipe, as often as it is called, a week later too; see `submit`."""
    from baton.pipelines.kubeflow import endpoint as connection
    from baton.pipelines.kubeflow import submit as kubeflow

    name = resumable.named(recipe, name)
    with packaged_for(recipe, endpoint, pipeline, tell) as package:
        content = Path(package).read_bytes()  # the file would have to last as long as the run

    def post() -> Submission:
        with tempfile.TemporaryDirectory(prefix="baton-submit-") as folder:
            path = Path(folder, f"{recipe.name}.yaml")
            path.write_bytes(content)
            return kubeflow.submit(
                str(path),
                endpoint,
                experiment=terms.get("experiment") or recipe.name,
                run_name=name,
                arguments=dict.fromkeys(NAMED_BY[pipeline], name),
                token=connection.token(),
                namespace=terms.get("namespace"),
                service_account=terms.get("service_account"),
                cache=terms.get("cache", True),
                registers=terms.get("registers", True),
            )

    return post


@contextlib.contextmanager
def packaged_for(recipe: Recipe, endpoint: str, pipeline: Pipeline, tell: Tell) -> Iterator[str]:
    """Yields the path of a recipe's package for an endpoint, and tells from where on its record cannot be read.

    Args:
        recipe: The recipe.
        endpoint: Where its pods will be started, and linked to.
        pipeline: The kind of pipeline.
        tell: Called with what somebody should know before a run.

    Raises:
        UserError: the workflow would be too large to end.
    """
    settled = for_pods.settled(_with_page(recipe, endpoint))
    with packaged(settled, recipe.name, pipeline) as package:
        if note := fits.frozen_note(fits.check_fits(package, settled, pipeline)):
            tell(note)
        yield package


def _with_page(recipe: Recipe, endpoint: str) -> Recipe:
    """Returns the recipe with the address of the Kubeflow page in the pods' environment, for links from MLflow."""
    page = os.environ.get(KUBEFLOW_PAGE) or endpoint
    is_private = "://localhost" in page or "://127." in page
    if is_private or KUBEFLOW_PAGE in recipe.resources.env:
        return recipe
    env = {**recipe.resources.env, KUBEFLOW_PAGE: page}
    return recipe.model_copy(update={"resources": recipe.resources.model_copy(update={"env": env})})
