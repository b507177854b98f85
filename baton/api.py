"""Baton for programs: recipes, checkpoints, runs on this machine, and runs on Kubeflow."""

from __future__ import annotations

import contextlib
import html
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from baton.checkpoint.store import Checkpoint, CheckpointStore, LogEntry
from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, packaged
from baton.errors import UserError
from baton.events import Event
from baton.local import begun, results
from baton.local.results import Listed, Result, VerifiedCheckpoint
from baton.recipe import load as recipe_file
from baton.recipe.recipe import Recipe
from baton.recipe.run import Chunks
from baton.runs.documents import AttachedRun
from baton.runs.run import Run, check_name
from baton.source import origin, prepare
from baton.source.prepare import LoadedRecipe
from baton.tracking.servers import KUBEFLOW_PAGE

if TYPE_CHECKING:
    from baton.compiler.workflow_size import WorkflowSize
    from baton.kubeflow.submit import RecurringRun, Submission


Overrides = Mapping[str, Any] | Sequence[str]
"""Changes to a recipe: dotted path → value, or `PATH=VALUE` lines as the command line takes them."""
Source = str | os.PathLike[str] | Mapping[str, Any] | Recipe
"""A recipe: path of a YAML file, name of a bundled one, YAML itself, plain values, or one that was read."""

HERE = "recipe"  # name in messages of a recipe without a file, whose paths start at the working directory


def load(
    source: Source | LoadedRecipe,
    overrides: Overrides = (),
    *,
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    here: bool = True,
    trust: bool = False,
) -> LoadedRecipe:
    """Reads and checks a recipe.

    Args:
        source: Path or address of a YAML file, name of a bundled recipe, a YAML text, plain values, or a recipe that
            was read.
        overrides: Changes to it: `{"training.learning_rate": 1e-4}`, or `["training.learning_rate=1e-4"]`.
        store: URI instead of the recipe's.
        chunks: Number of chunks instead of the recipe's.
        image: Container image instead of the recipe's.
        here: Whether it runs on this machine, so that the profile `auto` can inspect it.
        trust: Consent to run the code of a recipe from elsewhere, as it is now.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, or a value does not fit; it names each. Or the
            code of a recipe from elsewhere has no consent.
    """
    if isinstance(source, LoadedRecipe) and not (overrides or store or image) and chunks is None:
        return source
    found = _origin(source)
    found = replace(found, is_trusted=True) if trust else found
    return prepare.load(found, lines(overrides), store=store, chunks=chunks, image=image, here=here)


def lines(overrides: Overrides) -> list[str]:
    """Returns changes as the command line takes them."""
    if isinstance(overrides, Mapping):
        return [f"{path}={json.dumps(value)}" for path, value in overrides.items()]  # JSON is YAML
    return list(overrides)


def _origin(source: Source | LoadedRecipe) -> origin.RecipeSource:
    if isinstance(source, LoadedRecipe):
        return replace(source.origin, values=_plain(source.recipe))
    if isinstance(source, Recipe):
        return origin.RecipeSource(HERE, "", os.getcwd(), _plain(source))
    if isinstance(source, Mapping):
        return origin.RecipeSource(HERE, "", os.getcwd(), source)
    if isinstance(source, str) and ("\n" in source or ": " in source) and not os.path.exists(source):
        return origin.RecipeSource(HERE, source, os.getcwd())
    return origin.find(os.fspath(source))


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe_file.with_written_names(recipe.model_dump(mode="json", exclude_defaults=True))


class Checkpoints(Sequence[Listed]):
    """The committed checkpoints of a run as they were when it was opened, ascending.

    Each is a mapping with `step`, `uri`, `digest`, `parent`, `chunk`, `bytes`, `created` and more; one whose manifest
    is damaged has a `problem`.

    Attributes:
        run_uri: Address of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run_uri = run.uri
        self._store = CheckpointStore(run)
        self._rows = results.list_checkpoints(run)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Listed]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Listed: ...
    @overload
    def __getitem__(self, index: slice) -> list[Listed]: ...
    def __getitem__(self, index: int | slice) -> Listed | list[Listed]:
        return self._rows[index]

    def __repr__(self) -> str:
        return f"<checkpoints of {self.run_uri}: {', '.join(str(row['step']) for row in self._rows) or 'none'}>"

    def open(self, step: int | None = None) -> Checkpoint:
        """Returns a checkpoint with its manifest.

        Args:
            step: Its step; that of the newest one when left out.

        Raises:
            UserError: there is none.
        """
        return chosen_checkpoint(self._store, step)

    def verify(self) -> list[VerifiedCheckpoint]:
        """Reads every checkpoint back, byte for byte, and checks that they continue each other.

        Returns:
            A row for each, with `step`, `ok` and `problems`.
        """
        return results.verify_checkpoints(self._store.run)

    def history(self, step: int | None = None) -> list[LogEntry]:
        """Returns the trainer's log up to a checkpoint, an entry for each time it logged.

        Args:
            step: Its step; that of the newest one when left out.
        """
        return self._store.history(self.open(step))

    def fetch(self, folder: str, step: int | None = None) -> str:
        """Downloads a checkpoint, every byte checked, and returns its folder.

        `from_pretrained` reads it, and `Trainer.train(resume_from_checkpoint=…)`.

        Args:
            folder: A local folder that does not exist yet; in a store that is a folder it is left out, and its own
                returned.
            step: Its step; that of the newest one when left out.

        Raises:
            RewritableDamageError: it differs from the commit.
        """
        return self._store.fetch(self.open(step), folder)


def checkpoints(run_uri: str) -> Checkpoints:
    """Returns the checkpoints of a run, of a recipe or of a script.

    Args:
        run_uri: Address of the run, `STORE/runs/NAME`.

    Raises:
        UserError: there is no such run.
    """
    return Checkpoints(existing_run(run_uri))


def existing_run(run_uri: str) -> Run:
    """Returns a run that was begun.

    Raises:
        UserError: it was not.
    """
    run = Run.open(run_uri)
    if run.raw(AttachedRun.NAME) is None:
        run.require("recipe.json")
    return run


def chunks_of(run: Run) -> Chunks:
    """Returns the chunks section of a run's recipe or script."""
    attached = run.read(AttachedRun)
    return Chunks.model_validate(attached.chunks) if attached else run.recipe().chunks


def chosen_checkpoint(store: CheckpointStore, step: int | None) -> Checkpoint:
    """Returns the checkpoint of a step, the newest without one.

    Raises:
        UserError: there is none.
    """
    # An upload that was never committed is passed over; the newest one's damage is told.
    wanted = reversed(store.steps()) if step is None else [step]
    for each in wanted:
        if checkpoint := store.read(each):
            return checkpoint
    which = "" if step is None else f" of step {step}"
    there = f"; it has {steps}" if (steps := store.committed_steps()) else ""
    raise UserError(f"run {store.run.uri!r} has no checkpoint{which}{there}.")


@dataclass(frozen=True)
class LocalRun:
    """A run on this machine, begun before or not.

    Attributes:
        recipe: Its recipe, its paths absolute.
        run: The run in the store; of several phases that of their common name.
        last: The run whose model is the result: the last phase's, where there are phases.
    """

    recipe: Recipe
    run: Run
    last: Run

    @classmethod
    def of(cls, loaded: LoadedRecipe, name: str | None = None) -> LocalRun:
        """Returns the run of a recipe, and checks that it can be begun or resumed.

        Args:
            loaded: The recipe.
            name: The run's name; one that exists is resumed, a new one is made of recipe and time when left out.

        Raises:
            UserError: the name is none, or that of a run which trains something else; a source or model is missing.
            StoreError: the store cannot be reached or written.
        """
        recipe = loaded.localised()
        name = check_name(name or prepare.new_run_name(recipe))
        last = Run(prepare.check_store(recipe), prepare.last_run_name(recipe, name))
        prepare.check_resumable(recipe, last.storage, name)
        if not recipe.phases:
            last.require_same(recipe)
        return cls(recipe, Run(last.storage, name), last)

    def start(self, on_event: Callable[[Event], None] = lambda event: None, *, containers: bool = False) -> Result:
        """Runs all stages that are not done: split, tokenize, train in chunks, evaluate, export.

        Args:
            on_event: Called with each event of a stage, in a thread of the engine.
            containers: Whether stages are containers of the recipe's image; processes otherwise.

        Returns:
            The run's result; `state` is `succeeded`, or `rejected` by the recipe's gate.

        Raises:
            BatonError: a stage failed, with the message that the stage gave.
        """
        from baton.local import engine
        from baton.pages.publish import LivePage

        page = LivePage(self.last.uri)

        def heard(event: Event) -> None:
            on_event(event)
            page.heard(event)

        try:
            engine.run_recipe(
                self.recipe,
                self.run.name,
                arguments={"run_name": self.run.name},
                on_event=heard,
                containers=containers,
            )
        except KeyboardInterrupt:
            page.write(is_stopped=True)
            raise
        return self.result()

    def result(self) -> Result:
        """Returns the outcome of the run so far."""
        return results.result(self.last)


def run(
    recipe: Source | LoadedRecipe,
    name: str | None = None,
    *,
    overrides: Overrides = (),
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    containers: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Result:
    """Runs the whole pipeline on this machine, each stage a process or container of its own, and waits for it.

    Args:
        recipe: What `load` takes, or has returned.
        name: The run's name; one that exists resumes where it stopped.
        overrides: Changes to the recipe.
        store: URI instead of the recipe's.
        chunks: Number of chunks instead of the recipe's.
        image: Container image instead of the recipe's.
        containers: Whether stages are containers of the recipe's image.
        on_event: Called with each event of a stage.

    Returns:
        The run's result: `state`, `run_uri`, `model_uri`, `report_uri`, `checkpoints`, `metrics` and more.

    Raises:
        UserError: a mistake in recipe, path or credential.
        BatonError: a stage failed.
    """
    loaded = load(recipe, overrides, store=store, chunks=chunks, image=image)
    local = LocalRun.of(loaded, name)
    with _without_main():
        return local.start(on_event, containers=containers)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keeps the processes of stages from running the caller's script again."""
    # Those of multiprocessing do so to find their arguments. None of ours are the script's, which needs no guard.
    main = vars(sys.modules["__main__"])
    # Another run of this process may have taken them, and puts them back.
    kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if main.get(name) is not None}
    main["__spec__"] = None
    main.pop("__file__", None)
    try:
        yield
    finally:
        main.update(kept)


def result(run_uri: str) -> Result:
    """Returns the outcome of a run, from the store.

    Raises:
        UserError: there is no such run.
    """
    opened = Run.open(run_uri)
    opened.require("recipe.json")
    return results.result(opened, begun.live_since)


@dataclass(frozen=True)
class Report:
    """A run's report; a notebook shows it where it is the last value of a cell.

    Attributes:
        html: The page, self-contained.
        uri: Its address.
    """

    html: str = field(repr=False)
    uri: str
    height: int = 640

    def _repr_html_(self) -> str:
        # As text within the page: a notebook's server does not serve files outside of its own folder.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-popups" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )


def report(run_uri: str, *, height: int = 640) -> Report:
    """Returns the report of a run: learning curves, time, resume proof, samples, the recipe.

    Args:
        run_uri: Address of the run.
        height: Pixels that a notebook gives it.

    Raises:
        UserError: there is no such run, or it has no report yet.
    """
    opened = Run.open(run_uri)
    uri = results.report_uri(opened)
    if uri is None:
        raise UserError(f"run {opened.uri!r} has no report.", remedy="The first checkpoint writes it.")
    return Report(opened.storage.read(opened.path("report.html")).decode(), uri, height)


NAMED_BY = {Pipeline.finetune: ("run_name",), Pipeline.sweep: ("sweep_name",), Pipeline.retrain: ()}
"""Pipeline → its parameters for the name."""
OnWarning = Callable[[str], None]  # called with warnings before a run


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


@dataclass(frozen=True)
class Compiled:
    """A compiled recipe.

    Attributes:
        path: The file.
        num_chunks: Train-chunks in it.
        bytes: Its size.
        workflow: How large the workflow on the cluster grows.
        note: A remark on that; empty for none.
    """

    path: str
    num_chunks: int
    bytes: int
    workflow: WorkflowSize
    note: str


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
    tell: OnWarning = lambda line: None,
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
        raise UserError(f"output {path!r} does not end in .yaml.", remedy="Kubeflow takes YAML files.")
    if picture and not picture.endswith(".mmd"):
        raise UserError(
            f"graph {picture!r} does not end in .mmd.",
            remedy="The graph is Mermaid text: name the file FILE.mmd.",
        )
    kind = Pipeline(pipeline)
    loaded = load(recipe, overrides, store=store, chunks=chunks, image=image, here=False).recipe
    _warn(loaded, tell)
    with packaged(pipeline_file.for_cluster(loaded), "pipeline", kind) as package:
        size = pipeline_file.check_fits(package, loaded, kind)
        if picture:
            pipeline_file.write_graph(package, picture)
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        shutil.copyfile(package, path)  # last: a refused pipeline is not written
    return Compiled(path, loaded.num_chunks, os.path.getsize(path), size, pipeline_file.readability_warning(size))


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
    tell: OnWarning = lambda line: None,
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
    loaded = load(recipe, overrides, store=store, chunks=chunks, image=image, here=False)
    return Submitter(loaded, endpoint, name, Pipeline(pipeline), tell, **terms).submit()


class Submitter:
    """A recipe's pipeline for an endpoint: compiled once, submitted as often as it is asked, a week later too.

    Args:
        loaded: The recipe, as `load` returns it with `here=False`.
        endpoint: Kubeflow Pipelines API.
        name: The run's name; one that exists resumes where it stopped.
        pipeline: Its kind.
        on_warning: Called with what somebody should know before a run.
        terms: See `Terms`.

    Raises:
        UserError: the name is none, the recipe is not for pods, or the workflow would be too large to end.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        endpoint: str,
        name: str | None = None,
        pipeline: Pipeline = Pipeline.finetune,
        on_warning: OnWarning = lambda line: None,
        **terms: Unpack[Terms],
    ) -> None:
        recipe = loaded.recipe
        _warn(recipe, on_warning)
        self.endpoint, self.namespace = endpoint, terms.get("namespace")
        self._recipe, self._pipeline, self._terms = recipe.name, pipeline, terms
        self._on_warning = on_warning
        self._name = prepare.run_name_for_pods(recipe, name)
        recipe = pipeline_file.for_cluster(_with_page(recipe, endpoint))
        with packaged(recipe, recipe.name, pipeline) as package:
            size = pipeline_file.check_fits(package, recipe, pipeline)
            self._content = Path(package).read_bytes()  # the file would have to last as long as the run
        if note := pipeline_file.readability_warning(size):
            on_warning(note)

    def submit(self) -> Submission:
        """Starts a run, and does not wait for it.

        Raises:
            UserError: a mistake in address, token or name.
            BatonError: the endpoint cannot be reached or fails.
        """
        from baton.kubeflow import submit

        with self._package() as path:
            return submit.submit(
                path,
                self.endpoint,
                experiment=self._terms.get("experiment") or self._recipe,
                run_name=self._name,
                arguments=dict.fromkeys(NAMED_BY[self._pipeline], self._name),
                namespace=self.namespace,
                service_account=self._terms.get("service_account"),
                cache=self._terms.get("cache", True),
                registers=self._terms.get("registers", True),
            )

    def schedule(self, cron: str) -> RecurringRun:
        """Makes it a recurring run, see `baton.kubeflow.submit.schedule`."""
        from baton.kubeflow import submit

        with self._package() as path:
            return submit.schedule(
                path,
                self.endpoint,
                recipe=self._recipe,
                cron=cron,
                namespace=self.namespace,
                service_account=self._terms.get("service_account"),
                registers=self._terms.get("registers", True),
                on_warning=self._on_warning,
            )

    @contextlib.contextmanager
    def _package(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="baton-submit-") as folder:
            path = Path(folder, f"{self._recipe}.yaml")
            path.write_bytes(self._content)
            yield str(path)


def _warn(recipe: Recipe, on_warning: OnWarning) -> None:
    """Tells what of a recipe will not work in pods."""
    prepare.check_rendering(recipe)
    for warning in pipeline_file.cluster_warnings(recipe):
        on_warning(warning)


def _with_page(recipe: Recipe, endpoint: str) -> Recipe:
    """Returns the recipe with the address of the Kubeflow page in the pods' environment, for links from MLflow."""
    page = os.environ.get(KUBEFLOW_PAGE) or endpoint
    is_private = "://localhost" in page or "://127." in page
    if is_private or KUBEFLOW_PAGE in recipe.resources.env:
        return recipe
    env = {**recipe.resources.env, KUBEFLOW_PAGE: page}
    return recipe.model_copy(update={"resources": recipe.resources.model_copy(update={"env": env})})
