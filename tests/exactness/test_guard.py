"""A step that would spoil the run is found, taken back and skipped: the bits are those of a run that is told of it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton import fork as forking
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness import matrix
from tests.exactness.matrix import SCRATCH, WRITES, Cell, Changes, adapter, training

slow = pytest.mark.slow

PLANTED: Changes = {"hooks": {"trainer": "tests.resume.own:Planted"}}
SHORT = {"window": 4}
"""Four steps are few enough to be found in a test."""
FOUND = [(2, "nan"), (6, "loss"), (8, "grad_norm")]
"""What is planted, and by what it is found."""
ENDS = (3, 7, 10)
Verdict = tuple[int, str, float | None, float | None]
THRICE = {**WRITES, "num_iterations": 3}
"""Rounds of three steps: the first of a round is skipped, and one that trains on it once more."""
TWO = {"processes": 2, "hang_after": "60s"}


@pytest.fixture(scope="session")
def inside(legs: Any) -> Any:
    """What is changed in the processes."""
    return importlib.import_module("healing_legs")


@pytest.fixture
def heal(legs: Any, inside: Any) -> Any:
    """Trains a run, and returns what it has found by itself: step, reason, loss and norm."""

    def train(
        run: Run, ends: Sequence[int] = (), leave_out: tuple[str, ...] = (), leg: Any = inside.in_a_pod
    ) -> list[Verdict]:
        if ends:
            legs.cut(run, ends)
        for index in range(1, len(run.plan().targets) + 1):
            code, printed = legs.leg(leg, run.uri, index, *((leave_out,) if leave_out else ()))
            assert code == 0, printed
        return [(skip.step, skip.reason, skip.loss, skip.grad_norm) for skip in run.skips()]

    return train


def told(recipe: Recipe, steps: Sequence[int], legs: Any) -> Recipe:
    """Returns a recipe whose guard knows of steps from the start."""
    guard = {**recipe.model_dump(mode="json")["training"]["guard"], "skip": list(steps)}
    changed: Recipe = legs.changed(recipe, training__guard=guard)
    return changed


def planted(
    method: str, feature: str, changes: Changes | None = None, *, weights: str = "full", steps: int = 10
) -> Cell:
    """Returns a cell in which steps are spoilt."""
    merged = training(guard=SHORT)
    for part in (PLANTED, changes or {}):
        matrix.merge(merged, copy.deepcopy(part))
    return Cell(method, weights, f"guard {feature}", merged, steps=steps)


def _both(strategy: str) -> Changes:
    return training(parallel={**TWO, "strategy": strategy})


CELLS = [
    planted("sft", "alone"),
    planted("sft", "dropout", {"model": SCRATCH}),
    planted("sft", "accumulation", training(micro_batch_size=2, workers=2, log_every=3)),
    planted("sft", "adapter", adapter(dropout=0.3), weights="lora"),
    planted("sft", "evaluated", {**training(lr_scheduler="greedy"), "evaluation": {"every": 2}}),
    planted("sft", "early stopping", {**training(early_stopping={"patience": 9}), "evaluation": {"every": 1}}),
    planted("sft", "ddp", _both("ddp")),
    planted("sft", "fsdp", _both("fsdp")),
    planted("dpo", "alone"),
    planted("dpo", "moving reference", training(dpo={"sync_reference": {"every": 2, "mix": 0.5}})),
    planted("kto", "alone"),
    planted("grpo", "rounds", training(grpo=THRICE)),
    planted("grpo", "adapter", {**adapter(dropout=0.2), **training(grpo=THRICE)}, weights="lora"),
    planted("grpo", "ddp", training(grpo=THRICE, parallel={**TWO, "strategy": "ddp"})),
    planted("rloo", "rounds", training(rloo=THRICE)),
    planted("distillation", "rounds", training(micro_batch_size=2)),
]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=cell.name, marks=[slow] if place else []) for place, cell in enumerate(CELLS)]
)
def test_what_a_run_finds_leaves_it_on_the_bits_of_one_that_is_told(
    cell: Cell, grid: Any, heal: Any, legs: Any
) -> None:
    recipe = grid(cell)
    healed = legs.prepare(recipe, f"{cell.name}-healed")
    found = heal(healed, ENDS)
    steps = [step for step, *_ in found]
    print(f"guard | {cell.name} | {found}")
    if recipe.training.generation is None:
        assert [verdict[:2] for verdict in found] == FOUND
    assert 2 in steps
    given = legs.prepare(told(recipe, steps, legs), f"{cell.name}-told")
    legs.train(given)
    assert legs.final(healed).meta.state == legs.final(given).meta.state
    assert legs.losses(healed) == legs.losses(given)
    if recipe.training.log_every == 1:
        assert {step for step, _ in legs.losses(healed)} == set(range(1, 11)) - set(steps)
    assert set(legs.final(healed).meta.restored.checked.values()) == {"match", "absent"}


@slow
def test_checkpoints_leave_no_trace_in_what_is_found(grid: Any, heal: Any, legs: Any) -> None:
    cell = planted("sft", "checkpoints", {"model": SCRATCH})
    runs, found = [], []
    for every, ends in ((1, ()), (5, ()), (None, (1, 5, 7, 10)), (None, ())):
        recipe = legs.changed(grid(cell), chunks__checkpoint_every=every or "10m")
        runs.append(legs.prepare(recipe, f"{cell.name}-{every or 0}-{len(ends)}"))
        found.append(heal(runs[-1], ends))
    assert [verdict[:2] for verdict in found[0]] == FOUND
    assert found == found[:1] * 4
    assert {legs.final(run).meta.state["state"] for run in runs} == {legs.final(runs[0]).meta.state["state"]}


@slow
def test_without_its_window_a_run_finds_something_else(grid: Any, heal: Any, legs: Any) -> None:
    cell = planted("sft", "no window")
    recipe = grid(cell)
    restored, begun = (legs.prepare(recipe, f"{cell.name}-{name}") for name in ("restored", "begun"))
    assert [step for step, *_ in heal(restored, (4, 10))] == [2, 6, 8]
    assert [step for step, *_ in heal(begun, (4, 10), ("method",))] == [2], "it had seen no four steps"


@slow
def test_a_skipped_step_that_draws_would_leave_other_bits(grid: Any, heal: Any, legs: Any, inside: Any) -> None:
    cell = planted("sft", "draws", {"model": SCRATCH})
    recipe = told(grid(cell), (2, 6, 8), legs)
    still, drawing = (legs.prepare(recipe, f"{cell.name}-{name}") for name in ("still", "drawing"))
    legs.train(still)
    code, printed = legs.leg(inside.drawing, drawing.uri, 1)
    assert code == 0, printed
    assert legs.final(still).meta.state["weights"] != legs.final(drawing).meta.state["weights"]


@slow
@pytest.mark.parametrize("strategy", [None, "fsdp"])
def test_a_run_whose_first_step_is_bad_begins_anew_without_it(
    strategy: str | None, grid: Any, heal: Any, legs: Any
) -> None:
    """A checkpoint of it has an optimizer that has not made a step."""
    changes = {"hooks": {"trainer": "tests.resume.own:PlantedFirst"}, "model": SCRATCH}
    cell = planted("sft", f"first {strategy or 'alone'}", {**changes, **(_both(strategy) if strategy else {})})
    recipe = grid(cell)
    healed, given = (legs.prepare(told(recipe, x, legs), f"{cell.name}-{len(x)}") for x in ((), (1,)))
    assert [step for step, *_ in heal(healed, (1, 10))] == [1]
    legs.train(given)
    assert legs.final(healed).meta.state == legs.final(given).meta.state


@slow
def test_a_row_that_is_no_number_is_skipped_in_each_epoch(grid: Any, heal: Any, legs: Any, tmp_path: Path) -> None:
    cell = planted("sft", "row", {"hooks": {"trainer": "tests.resume.own:Marked"}}, steps=19)
    rows = Path(matrix.write_rows(tmp_path)).read_text().splitlines(keepends=True)
    source = tmp_path / "marked.jsonl"
    source.write_text("".join([*rows[:20], rows[20].replace("the value", "the ~ value"), *rows[21:]]))
    recipe = legs.changed(grid(cell), data__source=str(source), training__guard__window=100)
    run = legs.prepare(recipe, cell.name)
    found = heal(run)
    assert [reason for _, reason, *_ in found] == ["nan"] * len(found)
    assert [(step - 1) // 8 for step, *_ in found][:2] == [0, 1], "32 rows are 8 steps"
    given = legs.prepare(told(recipe, [step for step, *_ in found], legs), f"{cell.name}-told")
    legs.train(given)
    assert legs.final(run).meta.state == legs.final(given).meta.state


@slow
def test_learning_another_kind_of_rows_is_not_skipped(
    grid: Any, heal: Any, legs: Any, inside: Any, tmp_path: Path
) -> None:
    """A model that has learnt one kind of rows meets another: its loss leaps to nearly where it began."""
    source = tmp_path / "kinds.jsonl"
    kinds = ["the quick brown fox jumps", "dog lazy file of value 7 4 1"]
    lines = [{"question": f"What is {row}?", "good": kinds[row % 2], "kind": row % 2} for row in range(40)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def train(guard: dict[str, float], leg: Any) -> tuple[Run, int, str]:
        settings = {"guard": guard, "learning_rate": 1e-2}
        curriculum = {"by": "kind", "ramp": "step", "start": 0.5, "until": 0.5, "levels": 2}
        kept = {"data": {"extra_columns": ["kind"]}, **training(**settings, curriculum=curriculum)}
        recipe = legs.changed(grid(Cell("sft", "full", "kinds", kept, steps=40)), data__source=str(source))
        run = legs.prepare(recipe, f"guard-kinds-{len(guard)}")
        return run, *legs.leg(leg, run.uri, 1)

    run, code, printed = train({}, inside.in_a_pod)
    assert code == 0, printed
    assert run.skips() == []
    losses = [loss for _, loss in legs.losses(run)]
    print(f"guard | learning | {[round(loss, 2) for loss in losses]}")
    met = next(step for step in range(1, len(losses)) if losses[step] > 2 * losses[step - 1])
    assert losses[met] > 2.5 * losses[met - 1]
    _, code, printed = train({"window": 5, "loss": 1.5, "max_skips": 0}, inside.in_a_pod)
    assert code != 0
    assert f"step {met + 1} has the loss {losses[met]:.4g}" in printed, "where no step remembers how it began"


@slow
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_virtual_workers_find_the_same_in_any_number_of_processes(
    method: str, grid: Any, heal: Any, legs: Any, inside: Any
) -> None:
    settings = training(guard=SHORT, **({"grpo": {**THRICE, "num_iterations": 2}} if method == "grpo" else {}))
    matrix.merge(settings, training(batch_size=8, micro_batch_size=1, parallel={"virtual_workers": 4, "processes": 1}))
    model = {"model": SCRATCH} if method == "sft" else {}
    cell = Cell(method, "full", "guard virtual", {**settings, **model}, steps=10)
    runs, found = [], []
    for processes in (1, 2, 4):
        recipe = legs.changed(grid(cell), training__parallel__processes=processes)
        runs.append(legs.prepare(recipe, f"{cell.name}-{processes}"))
        found.append(heal(runs[-1], ENDS[1:], leg=inside.planted))
    steps = [step for step, *_ in found[0]]
    print(f"guard | {cell.name} | {found[0]}")
    assert 2 in steps
    assert found == found[:1] * 3
    runs.append(legs.prepare(told(grid(cell), steps, legs), f"{cell.name}-told"))
    heal(runs[-1], leg=inside.planted)
    assert len({legs.final(run).meta.state["state"] for run in runs}) == 1


@slow
def test_a_fork_may_have_another_guard_or_none(grid: Any, heal: Any, legs: Any) -> None:
    cell = planted("sft", "parent", {"hooks": {"trainer": None}, "model": SCRATCH})
    parent = legs.prepare(told(grid(cell), [2, 8], legs), cell.name)
    heal(parent, (5, 10))
    for name, override in (("wider", "training.guard.window=50"), ("bare", "training.guard=null")):
        fork = forking.fork(parent, 5, f"guard-fork-{name}", [override])
        run = legs.prepare(fork.recipe, fork.run.name)
        heal(run)
        state, theirs = legs.final(run).meta, legs.final(parent).meta
        assert state.skips == ([2, 8] if name == "wider" else [2])
        assert (state.state["weights"] == theirs.state["weights"]) == (name == "wider")
        assert state.state["method"] != theirs.state["method"], "the window is another"


@slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
def test_what_deepspeed_has_updated_is_taken_back(grid: Any, heal: Any, legs: Any) -> None:
    cell = planted("sft", "zero2", _both("zero2"))
    recipe = grid(cell)
    healed = legs.prepare(recipe, f"{cell.name}-healed")
    steps = [step for step, *_ in heal(healed, ENDS)]
    assert steps == [2, 6, 8]
    given = legs.prepare(told(recipe, steps, legs), f"{cell.name}-told")
    legs.train(given)
    assert legs.final(healed).meta.state == legs.final(given).meta.state
