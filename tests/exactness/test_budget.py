"""A run that its budget ends is, bit for bit, the run that was planned for that length."""

from __future__ import annotations

import copy
import importlib
import signal
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.documents import RunEnd, RunInfo
from baton.runs.run import Run
from tests.exactness import matrix
from tests.exactness.matrix import Cell, Changes, adapter, training

pytestmark = pytest.mark.timeout(900)
slow = pytest.mark.slow

STEPS = 19
DECAY = {"lr_scheduler": "warmup_stable_decay", "lr_scheduler_options": {"num_decay_steps": 4}, "warmup_steps": 2}
LIMIT = {"limit": "1h", "reserve": "1s"}
EARLY, LATE = 2500.0, 1500.0
"""Seconds after its start at which the first chunk begins, of an hour."""


def limited(cell: Cell) -> Cell:
    """Returns a cell whose schedule ends in a decay."""
    changes = training(**DECAY)
    matrix.merge(changes, copy.deepcopy(cell.changes))
    return Cell(cell.method, cell.weights, f"budget {cell.feature}", changes, steps=STEPS)


CELLS = [
    limited(Cell("sft", "lora", "dropout", adapter(dropout=0.3))),
    limited(Cell("sft", "full", "evaluated", {"evaluation": {"every": 3}})),
    limited(Cell("sft", "full", "constant", training(lr_scheduler="constant", lr_scheduler_options={}))),
    limited(Cell("dpo", "full", "alone")),
    limited(Cell("grpo", "full", "alone")),
]


@pytest.fixture(scope="session")
def inside(legs: Any) -> Any:
    """What is changed in the processes."""
    return importlib.import_module("budget_legs")


def decided(run: Run) -> RunEnd:
    end = run.end(run.need(RunInfo))
    assert end is not None
    return end


def train(run: Run, legs: Any, inside: Any, begins_at: float, kill_at: str | None = None) -> int:
    """Trains all chunks of a run from its first process on, and returns that one's exit code."""
    first, printed = legs.leg(inside.chunk, run.uri, 1, begins_at, kill_at)
    assert first == (-signal.SIGKILL if kill_at else 0), printed
    for index in range(1, len(run.plan().targets) + 1):
        code, printed = legs.leg(inside.chunk, run.uri, index, begins_at)
        assert code == 0, printed
    return int(first)


def planned(recipe: Recipe, last_step: int, name: str, legs: Any) -> Run:
    """Trains the run without a budget that is told its last step from the start."""
    run: Run = legs.prepare(legs.changed(recipe, training__max_steps=last_step, budget=None), name)
    legs.train(run)
    return run


@pytest.mark.parametrize("begins_at", [pytest.param(EARLY, id="early"), pytest.param(LATE, id="late", marks=slow)])
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=cell.name, marks=[slow] if place else []) for place, cell in enumerate(CELLS)]
)
def test_a_run_that_its_budget_ends_equals_one_of_that_length(
    cell: Cell, begins_at: float, grid: Any, legs: Any, inside: Any
) -> None:
    recipe = legs.changed(grid(cell), budget=LIMIT)
    run = legs.prepare(recipe, f"{cell.name}-{begins_at:.0f}")
    legs.cut(run, (5, 11, STEPS))
    train(run, legs, inside, begins_at)
    end = decided(run)
    print(f"budget | {cell.name} | {end.span} {end.reason}")
    assert end.is_decayed
    assert end.last_step < STEPS
    told = planned(recipe, end.last_step, f"{run.name}-told", legs)
    mine, theirs = legs.final(run, end.last_step).meta, legs.final(told).meta
    assert mine.state == theirs.state
    assert (mine.finished, theirs.finished) == (True, False)
    assert CheckpointStore(run).history(legs.final(run, end.last_step)) == legs.history(told)
    later = planned(recipe, end.last_step + 1, f"{run.name}-later", legs)  # control
    assert legs.final(later).meta.state["weights"] != mine.state["weights"]
