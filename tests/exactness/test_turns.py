"""Trials that take turns inside one process end on the bits of their recipes alone."""

from __future__ import annotations

from typing import Any

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.run import Store
from baton.runs.run import Run, Sweep
from baton.store.storage import Storage
from baton.sweep import search
from tests.exactness import matrix_turns
from tests.exactness.matrix import Cell

CHUNKS = 3
PARAMETERS = {"seed": [7, 8], "training.learning_rate": [5e-3, 2e-3]}


def swept(recipe: Recipe, name: str, parameters: dict[str, Any]) -> Recipe:
    document = recipe.model_dump(mode="json")
    document["sweep"] = {"method": "grid", "parameters": parameters}
    document["chunks"]["count"] = CHUNKS
    document["data"]["max_samples"] = None  # with few, a seed may leave no held-out row
    return load.validate(document, origin=name)


def begin(recipe: Recipe, name: str, legs: Any) -> list[Run]:
    """Returns the runs of a sweep's trials, which have trained nothing."""
    code, printed = legs.leg(legs.begin_sweep, load.dumps(recipe), name)
    assert code == 0, printed
    sweep = Sweep(Storage(recipe.store.uri), name)
    return [sweep.run(trial) for trial in sweep.document().trials]


def alone(recipe: Recipe, runs: list[Run], name: str, legs: Any) -> list[Run]:
    """Trains each trial's recipe by itself, without a stop, and returns the runs."""
    sweep = Sweep(runs[0].storage, name)
    whole = []
    for trial in sweep.document().trials:
        own = search.configured(recipe, trial.values, trial.id)
        whole.append(legs.prepare(own, f"{trial.run}-alone"))
        legs.cut(whole[-1], [own.training.max_steps])
        legs.train(whole[-1])
    return whole


def state(run: Run, legs: Any) -> Any:
    return legs.final(run, max(legs.steps(run))).meta.state


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.name, marks=[] if cell.quick else [pytest.mark.slow]) for cell in matrix_turns.cells()],
)
def test_each_trial_ends_on_the_bits_of_its_recipe_alone(cell: Cell, grid: Any, legs: Any) -> None:
    recipe = swept(grid(cell), cell.name, PARAMETERS if cell.quick else {"seed": [7, 8]})
    name = f"turns-{cell.name}"
    runs = begin(recipe, name, legs)
    # In the first trial's turn, and as the next start saves for the first time.
    for kill_at in (f"step:{cell.middle}", "phase:save", None):
        code, printed = legs.leg(legs.turns, [run.uri for run in runs], 1, CHUNKS, (), kill_at)
        assert code == (-9 if kill_at else 0), printed
    for run, whole in zip(runs, alone(recipe, runs, name, legs), strict=True):
        assert state(run, legs) == state(whole, legs)
        assert legs.losses(run, max(legs.steps(run))) == legs.losses(whole, max(legs.steps(whole)))


def test_random_state_that_another_trial_leaves_is_seen(grid: Any, legs: Any) -> None:
    recipe = swept(
        grid(next(cell for cell in matrix_turns.cells() if cell.quick)),
        "left",
        {"training.learning_rate": [5e-3, 2e-3]},
    )
    runs = begin(recipe, "turns-left", legs)
    code, printed = legs.leg(legs.turns, [run.uri for run in runs], 1, CHUNKS, ("rng",))
    assert code == 0, printed
    whole = alone(recipe, runs, "turns-left", legs)
    assert [state(run, legs)["weights"] for run in runs] != [state(run, legs)["weights"] for run in whole]


@pytest.mark.s3
@pytest.mark.slow
def test_a_trial_goes_on_from_the_memory_of_its_process(s3_store: str, grid: Any, legs: Any) -> None:
    """Bytes from a bucket: tokens once for all trials, no checkpoint at all."""
    recipe = grid(Cell("pretrain", "full", "plain")).model_copy(update={"store": Store(uri=s3_store)})
    recipe = swept(recipe, "memory", {"training.learning_rate": [5e-3, 2e-3]})
    runs = begin(recipe, "turns-memory", legs)
    code, printed = legs.leg(legs.turns, [run.uri for run in runs], 1, CHUNKS)
    assert code == 0, printed
    received = {
        (run.name, chunk): run.attempts(chunk)[0].bytes_received for run in runs for chunk in range(1, CHUNKS + 1)
    }
    assert [turn for turn, size in received.items() if size] == [(runs[0].name, 1)]
    for run, whole in zip(runs, alone(recipe, runs, "turns-memory", legs), strict=True):
        assert state(run, legs) == state(whole, legs)
