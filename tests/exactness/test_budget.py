"""A run that its budget ends is, bit for bit, the run that was planned for that length."""

from __future__ import annotations

import importlib
import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from baton import fork as forking
from baton.checkpoint import seals
from baton.recipe.recipe import Recipe
from baton.runs import objects
from baton.runs.bill import bill
from baton.runs.documents import RunEnd, RunInfo
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train.context import TrainContext
from tests.exactness.matrix import Cell, adapter, training
from tests.exactness.matrix_budget import ALONE, STEPS, limited

slow = pytest.mark.slow

LIMIT = {"limit": "1 USD", "price": 1.0, "reserve": "1s"}
EARLY, LATE = 2900.0, 1900.0
"""Seconds, of the hour that this pays, in which the first chunk has not yet begun to train."""
SPANS = {(True, EARLY): (3, 7), (True, LATE): (13, 17), (False, EARLY): (7, 8), (False, LATE): (17, 18)}
"""Whether there is a decay, and what is over → the last stable step, and the last one."""


CELLS = [
    limited(Cell("sft", "lora", "dropout", adapter(dropout=0.3))),
    limited(Cell("sft", "full", "evaluated", {"evaluation": {"every": 3}})),
    limited(Cell("sft", "full", "constant", training(lr_scheduler="constant", lr_scheduler_options={}))),
    *ALONE,
]


@pytest.fixture(scope="session")
def inside(legs: Any) -> Any:
    """What is changed in the processes."""
    return importlib.import_module("budget_legs")


def decided(run: Run) -> RunEnd:
    end = run.end(run.need(RunInfo))
    assert end is not None
    return end


def train(run: Run, legs: Any, inside: Any, begins_at: float, kill_at: str | None = None) -> None:
    """Trains all chunks of a run, whose first process may be killed."""
    if kill_at:
        first, printed = legs.leg(inside.chunk, run.uri, 1, begins_at, kill_at)
        assert first == -signal.SIGKILL, printed
    for index in range(1, len(run.plan().targets) + 1):
        code, printed = legs.leg(inside.chunk, run.uri, index, begins_at if index == 1 else 0.0)
        assert code == 0, printed


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
    assert end.span == SPANS[bool(recipe.training.decay_steps), begins_at]
    told = planned(recipe, end.last_step, f"{run.name}-told", legs)
    mine, theirs = legs.final(run, end.last_step).meta, legs.final(told).meta
    assert mine.state == theirs.state
    assert (mine.finished, theirs.finished) == (True, False)
    assert legs.losses(run, end.last_step) == legs.losses(told)
    later = planned(recipe, end.last_step + 1, f"{run.name}-later", legs)  # control
    assert legs.final(later).meta.state["weights"] != mine.state["weights"]


SFT = CELLS[0]


@pytest.fixture(scope="module")
def recipe(grid: Any, legs: Any) -> Recipe:
    """One that saves each step, and keeps the newest checkpoint alone."""
    changed: Recipe = legs.changed(grid(SFT), budget=LIMIT, chunks__checkpoint_every=1, chunks__keep={"last": 1})
    return changed


@slow
@pytest.mark.parametrize("moment", [pytest.param("end_decided:7", id="decided"), pytest.param("step:5", id="decay")])
def test_a_kill_around_the_decision_changes_nothing(moment: str, recipe: Recipe, legs: Any, inside: Any) -> None:
    run = legs.prepare(recipe, f"budget-killed-{moment.replace(':', '-').lower()}".replace("_", "-"))
    train(run, legs, inside, EARLY, moment)
    end = decided(run)
    told = planned(recipe, end.last_step, f"{run.name}-told", legs)
    assert legs.final(run, end.last_step).meta.state == legs.final(told).meta.state
    paid = bill(run)
    assert paid
    assert [(cut.outcome, cut.chunk) for cut in paid.interruptions] == [("killed", 1)]
    assert paid.on_demand < paid.total  # which has two starts


@pytest.fixture(scope="module")
def ended(recipe: Recipe, legs: Any, inside: Any) -> Run:
    """Its run, which the budget has ended."""
    run: Run = legs.prepare(recipe, "budget-ended")
    train(run, legs, inside, EARLY)
    return run


@slow
def test_without_a_budget_no_document_tells_of_one(recipe: Recipe, ended: Run, legs: Any, inside: Any) -> None:
    plain = legs.prepare(legs.changed(recipe, budget=None), "budget-none")
    legs.train(plain)
    words = ('"budget"', '"voided"', '"device_seconds"', '"end"', '"price"')
    told = {run.name: [word for word in words if word in _documents(run)] for run in (plain, ended)}
    assert told == {plain.name: [], ended.name: ['"budget"', '"device_seconds"', '"end"', '"price"']}


@slow
def test_a_larger_budget_goes_on_from_before_the_decay(ended: Run, recipe: Recipe, legs: Any, inside: Any) -> None:
    end = decided(ended)
    assert (end.stable_until, end.last_step) == (3, 7)
    assert {7, 3} <= {*legs.steps(ended)} < {7, 6, 5, 4, 3}
    legs.adopt(ended, recipe)  # the same budget
    assert decided(ended) == end
    legs.adopt(ended, legs.changed(recipe, budget={**LIMIT, "limit": "100 USD"}))
    assert ended.end(ended.need(RunInfo)) is None
    train(ended, legs, inside, EARLY)
    assert ended.end(ended.need(RunInfo)) is None
    whole = planned(recipe, STEPS, "budget-whole", legs)
    assert legs.final(ended).meta.state == legs.final(whole).meta.state
    assert legs.final(ended).meta.restored.checked is not None
    assert legs.losses(ended) == legs.losses(whole)


@slow
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in ALONE])
def test_every_method_goes_on_with_a_larger_budget(cell: Cell, grid: Any, legs: Any, inside: Any) -> None:
    recipe = legs.changed(grid(cell), budget=LIMIT, chunks__checkpoint_every=1, chunks__keep={"last": 1})
    run = legs.prepare(recipe, f"{cell.name}-extended")
    train(run, legs, inside, EARLY)
    assert decided(run).span == (3, 7)
    legs.adopt(run, legs.changed(recipe, budget={**LIMIT, "limit": "100 USD"}))
    train(run, legs, inside, EARLY)
    whole = planned(recipe, STEPS, f"{cell.name}-whole", legs)
    assert legs.final(run).meta.state == legs.final(whole).meta.state
    assert legs.losses(run) == legs.losses(whole)


@slow
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in ALONE])
def test_every_method_ends_earlier_with_a_smaller_budget(cell: Cell, grid: Any, legs: Any, inside: Any) -> None:
    """Given after the first of three chunks, which had a budget for all steps."""
    recipe = legs.changed(grid(cell), budget={**LIMIT, "limit": "100 USD"})
    run = legs.prepare(recipe, f"{cell.name}-cut")
    legs.cut(run, (5, 11, STEPS))
    code, printed = legs.leg(inside.chunk, run.uri, 1, EARLY)
    assert code == 0, printed
    legs.adopt(run, legs.changed(recipe, budget={**LIMIT, "limit": "1.2 USD"}))
    for index in (2, 3):
        code, printed = legs.leg(inside.chunk, run.uri, index, 0.0)
        assert code == 0, printed
    end = decided(run)
    assert end.is_decayed
    assert 5 < end.stable_until < end.last_step < STEPS
    told = planned(recipe, end.last_step, f"{run.name}-told", legs)
    assert legs.final(run, end.last_step).meta.state == legs.final(told).meta.state
    assert legs.losses(run, end.last_step) == legs.losses(told)


@slow
def test_trackers_have_what_a_run_has_cost(recipe: Recipe, legs: Any, inside: Any) -> None:
    run = legs.prepare(legs.changed(recipe, tracking__jsonl=True), "budget-tracked")
    train(run, legs, inside, EARLY)
    names = run.storage.list(run.path("metrics"))
    lines = "".join(run.storage.read(run.path(f"metrics/{name}")).decode() for name in names).splitlines()
    told = [entry for entry in map(json.loads, lines) if "loss" in entry]
    spent = [entry["budget_spent"] for entry in told]
    assert spent[0] == pytest.approx(EARLY / 3600, abs=2 * 100 / 3600)
    steps = [after - before for before, after in itertools.pairwise(spent)]
    assert steps == pytest.approx([100 / 3600] * len(steps))
    assert len(steps) == 6
    assert told[-1]["budget_predicted"] == pytest.approx(spent[-1], abs=100 / 3600)
    assert told[1]["budget_predicted"] > 1.0  # the whole plan


@slow
def test_a_fork_of_the_decay_ends_with_it_or_is_free_of_it(recipe: Recipe, legs: Any, inside: Any) -> None:
    parent = legs.prepare(legs.changed(recipe, chunks__keep={"last": 99}), "budget-parent")
    train(parent, legs, inside, EARLY)
    same = forking.fork(parent, 5, "budget-fork-same").run
    legs.train(same)
    assert decided(same) == decided(parent)
    assert legs.final(same, 7).meta.state == legs.final(parent, 7).meta.state
    longer = forking.fork(parent, 5, "budget-fork-longer", ["budget.limit=100 USD"]).run
    legs.train(longer)
    assert longer.end(longer.need(RunInfo)) is None
    assert legs.final(longer).step == STEPS
    assert set(legs.final(longer).meta.restored.checked.values()) == {"match", "absent"}


def test_a_budget_costs_one_read_a_chunk(recipe: Recipe, legs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read, asked = legs.prepare(recipe, "budget-asked"), Storage.read, []
    monkeypatch.setattr(Storage, "read", lambda storage, path: (asked.append(path), read(storage, path))[1])
    reads = []
    for budget in (LIMIT, None):
        legs.adopt(run, legs.changed(recipe, budget=budget))
        asked.clear()
        with seals.stage(run, objects.CHUNK, 1):
            TrainContext.open(run.uri, 1)
        reads.append([path.removeprefix(f"{run.path()}/") for path in asked])
    assert reads[0].count("ends/end-001.json") == 1
    assert len(reads[0]) == len(reads[1]) + 1


def _documents(run: Run) -> str:
    """Returns all of a run's documents and manifests."""
    folder = Path(run.storage.key(run.path()))
    paths = [path for path in folder.rglob("*.json") if path.name != "trainer_state.json"]
    return "".join(path.read_text() for path in paths if path.parent.name != "tokenizer")
