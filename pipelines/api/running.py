"""Runs of the whole pipeline on this machine."""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.components.shared.core.events import Event
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.outcome import ReportPage
from baton.components.shared.runs.run import Run, check_name
from baton.components.shared.store.storage import Storage
from baton.pipelines.api.recipes import LoadedRecipe, Overrides, Source, load
from baton.pipelines.compiling import prepare, resumable
from baton.pipelines.local import results
from baton.pipelines.local.results import Result


def ignored(event: Event) -> None:
    """Does nothing with an event."""


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
        resumable.check(recipe, last.storage, name)
        if not recipe.phases:
            last.require_same(recipe)
        return cls(recipe, Run(last.storage, name), last)

    def start(self, on_event: Callable[[Event], None] = ignored, *, containers: bool = False) -> Result:
        """Runs all stages that are not done: split, tokenize, train in chunks, evaluate, export.

        Args:
            on_event: Called with each event of a stage, in a thread of the engine.
            containers: Whether stages are containers of the recipe's image; processes otherwise.

        Returns:
            What the run came to; `state` is `succeeded`, or `rejected` by the recipe's gate.

        Raises:
            BatonError: a stage failed, with the message that the stage gave.
        """
        from baton.pipelines.local import engine

        engine.run_recipe(
            self.recipe,
            self.run.name,
            arguments={"run_name": self.run.name},
            on_event=on_event,
            containers=containers,
        )
        return self.result()

    def result(self) -> Result:
        """Returns what the run has come to so far."""
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
    on_event: Callable[[Event], None] = ignored,
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
        What the run came to: `state`, `run_uri`, `model_uri`, `report_uri`, `checkpoints`, `metrics` and more.

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
    """Keeps the processes of stages from running the caller's script again, as multiprocessing's do to find what they
    are given: they are given nothing of it, and a script need not guard its lines by `__name__`."""
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
    """Returns what a run has come to, from the store.

    Raises:
        UserError: there is no such run.
    """
    opened = Run.open(run_uri)
    opened.require("recipe.json")
    return results.result(opened)


@dataclass(frozen=True)
class Report:
    """A run's report; a notebook shows it where it is the last value of a cell.

    Attributes:
        html: The page, which needs nothing besides.
        uri: Where it lies.
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
    page = opened.need(ReportPage)
    folder, _, name = page.report_uri.rpartition("/")
    return Report(Storage(folder).read(name).decode(), page.report_uri, height)
