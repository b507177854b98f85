"""Virtual workers, by method and feature: whatever processes share them, the state is that of one process."""

from __future__ import annotations

from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness import matrix_virtual
from tests.exactness.matrix import READS, Cell
from tests.exactness.matrix_virtual import FEW, NAME, TARGETS, WAYS

CELLS = [pytest.param(x, id=x.name, marks=pytest.mark.slow) for x in matrix_virtual.cells()]


def shared(legs: Any, recipe: Recipe, processes: int) -> Recipe:
    """Returns a recipe whose workers are shared by so many processes."""
    parallel = recipe.parallel.model_dump(mode="json")
    changed: Recipe = legs.changed(recipe, training__parallel={**parallel, "processes": processes})
    return changed


@pytest.fixture
def trained(grid: Any, legs: Any) -> Any:
    """Returns the run of a cell whose chunks have these numbers of processes."""

    def train(cell: Cell, way: tuple[int, ...]) -> Run:
        recipe = grid(cell)
        run: Run = legs.prepare(shared(legs, recipe, way[0]), f"{cell.name}-{'-'.join(map(str, way))}")
        if len(way) > 1:
            legs.cut(run, TARGETS)
        for index, processes in enumerate(way, 1):
            legs.adopt(run, shared(legs, recipe, processes))
            code, printed = legs.leg(legs.chunk, run.uri, index)
            assert code == 0, printed
        return run

    return train


@pytest.mark.parametrize("cell", CELLS)
def test_the_number_of_processes_leaves_no_trace(cell: Cell, trained: Any, legs: Any) -> None:
    one = trained(cell, (1,))
    workers, end = one.recipe().workers, max(legs.steps(one))
    whole, losses = legs.final(one, end).meta.state, legs.losses(one, end)
    if "packing" not in cell.feature and workers == 4:
        assert 0 < one.plan().rows % one.recipe().training.batch_size < 4, one.plan().rows
    found = {}
    for name, way in WAYS.items():
        if way == (1,) or max(way) > workers or (cell.feature != NAME and name not in FEW):
            continue
        run = trained(cell, way)
        last = legs.final(run, end)
        found[name] = last.meta.state
        assert last.meta.state == whole, name
        assert legs.losses(run, end) == losses, name
        assert last.meta.fingerprint.world_size in way
        if len(way) > 1:
            assert last.meta.restored.level == "bitwise"
            assert set(last.meta.restored.checked.values()) <= {"match", "absent"}
    shown = [f"{name} {state['state'][:8]}" for name, state in {"×1": whole, **found}.items()]
    print(f"virtual | {cell.method} | {cell.weights} | {cell.feature} | {' | '.join(shown)}")


@pytest.mark.slow
@pytest.mark.parametrize("method", READS)
def test_what_is_learned_is_what_one_process_learns_without_them(
    method: str, grid: Any, trained: Any, legs: Any
) -> None:
    """All that is logged: values of each pass, norms of gradients, totals, and what an evaluation measures."""
    cell = matrix_virtual.still(method)
    alone = legs.prepare(legs.changed(grid(cell), training__parallel=None), f"{cell.name}-alone")
    legs.train(alone)
    ours, theirs = (
        {(entry["step"], name): value for entry in legs.history(run) for name, value in entry.items()}
        for run in (trained(cell, (1,)), alone)
    )
    timed = ("runtime", "per_second", "epoch")  # an epoch's share is counted in passes, of which these may have more
    ours, theirs = ({of: x for of, x in y.items() if not of[1].endswith(timed)} for y in (ours, theirs))
    assert ours.keys() == theirs.keys()
    differ = {of: (x, theirs[of]) for of, x in ours.items() if x != pytest.approx(theirs[of], rel=2e-3, abs=2e-5)}
    assert not differ, differ
