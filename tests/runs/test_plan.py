"""The plan: where chunks end follows from a few numbers."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.errors import DamagedError, UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.plan import Plan, make_plan

TEMPLATE: dict[str, Any] = {
    "name": "tiny",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
}


def recipe(count: int | str = 1, **training: Any) -> Recipe:
    """A recipe with so many chunks."""
    document = copy.deepcopy({**TEMPLATE, "chunks": {"count": count}, "training": training})
    return load.validate(document, origin="r.yaml")


CASES = {
    "one epoch": (100, 1, {"batch_size": 10}, 10, 10, (10,)),
    "last batch smaller": (101, 2, {"batch_size": 10}, 11, 11, (6, 11)),
    "epochs": (100, 4, {"batch_size": 10, "epochs": 2}, 10, 20, (5, 10, 15, 20)),
    "part of an epoch": (100, 2, {"batch_size": 10, "epochs": 0.25}, 10, 3, (2, 3)),
    "steps": (100, 3, {"batch_size": 10, "max_steps": 7}, 10, 7, (3, 5, 7)),
    "per epoch": (100, "per-epoch", {"batch_size": 10, "epochs": 3}, 10, 30, (10, 20, 30)),
    "per epoch, a part of one last": (100, "per-epoch", {"batch_size": 10, "epochs": 2.5}, 10, 25, (10, 20, 25)),
    "per epoch, less than one": (100, "per-epoch", {"batch_size": 10, "epochs": 0.5}, 10, 5, (5,)),
    "per epoch, one by default": (100, "per-epoch", {"batch_size": 10}, 10, 10, (10,)),
    "a step each": (8, 4, {"batch_size": 2}, 4, 4, (1, 2, 3, 4)),
    "fewer rows than a batch": (3, 1, {"batch_size": 8}, 1, 1, (1,)),
}


@pytest.mark.parametrize(("rows", "count", "training", "per_epoch", "steps", "targets"), CASES.values(), ids=CASES)
def test_plan(rows: int, count: int | str, training: Any, per_epoch: int, steps: int, targets: tuple[int, ...]):
    expected = Plan(rows=rows, steps_per_epoch=per_epoch, num_steps=steps, targets=targets)

    assert make_plan(recipe(count, **training), rows) == expected


WRITES = {"rewards": ["length"], "num_generations": 4}
ROUNDS = {
    "a round is a step": (10, {"batch_size": 8}, {}, 5),
    "prompts left over": (11, {"batch_size": 8}, {}, 5),
    "a round of two steps": (10, {"batch_size": 8}, {"steps_per_generation": 2}, 4),
    "a round of half a step": (
        10,
        {"batch_size": 8, "micro_batch_size": 4},
        {"steps_per_generation": 1},
        5,
    ),
    "a round ends within a step": (
        3,
        {"batch_size": 8, "micro_batch_size": 4},
        {"steps_per_generation": 1},
        2,
    ),
    "each round three times": (10, {"batch_size": 8}, {"num_iterations": 3}, 15),
    "more generations than a micro-batch": (10, {"batch_size": 8, "micro_batch_size": 2}, {}, 5),
}


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize(("rows", "training", "generation", "per_epoch"), ROUNDS.values(), ids=ROUNDS)
def test_steps_where_the_model_writes(method: str, rows: int, training: Any, generation: Any, per_epoch: int):
    given = recipe(1, method=method, **training, **{method: {**WRITES, **generation}})

    assert make_plan(given, rows).steps_per_epoch == per_epoch


def test_too_few_prompts_for_a_round():
    given = recipe(method="grpo", batch_size=8, grpo={**WRITES, "steps_per_generation": 3})

    assert make_plan(given, 6).num_steps == 3
    with pytest.raises(UserError) as caught:
        make_plan(given, 5)
    assert str(caught.value) == (
        "one round of grpo takes 6 prompts, and there are 5. Give more rows, or lower batch_size or "
        "steps_per_generation, or raise num_generations."
    )


@given(rows=st.integers(1, 10**7), batch=st.integers(1, 4096), count=st.integers(1, 100), epochs=st.floats(0.01, 50))
def test_targets(rows: int, batch: int, count: int, epochs: float):
    steps = math.ceil(math.ceil(rows / batch) * epochs)
    assume(count <= steps)

    plan = make_plan(recipe(count, batch_size=batch, epochs=epochs), rows)
    sizes = [end - start for start, end in zip((0, *plan.targets), plan.targets, strict=False)]

    assert plan == make_plan(recipe(count, batch_size=batch, epochs=epochs), rows)
    assert len(plan.targets) == count
    assert plan.targets[-1] == plan.num_steps == steps
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert Plan.read(json.dumps(plan.to_json()).encode(), "plan.json") == plan


def test_more_chunks_than_steps():
    with pytest.raises(UserError) as caught:
        make_plan(recipe(5, batch_size=10), 40)

    assert str(caught.value) == (
        "chunks.count is 5, but 40 rows at batch_size 10 give 4 steps. Use at most 4 chunks, or train longer."
    )


def test_no_rows():
    with pytest.raises(UserError, match="no training rows are left after the split"):
        make_plan(recipe(), 0)


CADENCES = {
    "even": (8, 2, [4, 8, 12, 16]),
    "rounded up": (5, 2, [3, 5, 8, 10, 13, 15]),
    "three of eight": (8, 3, [3, 6, 8, 11, 14, 16]),
    "once": (5, 1, [5, 10, 15]),
    "each step": (3, 3, [1, 2, 3, 4, 5, 6]),
    "more than there are steps": (3, 7, [1, 2, 3, 4, 5, 6]),
    "an epoch of one step": (1, 2, [1, 2, 3]),
}


@pytest.mark.parametrize(("per_epoch", "times", "steps"), CADENCES.values(), ids=CADENCES)
def test_steps_of_a_cadence_by_epoch(per_epoch: int, times: int, steps: list[int]):
    plan = Plan(rows=per_epoch, steps_per_epoch=per_epoch, num_steps=steps[-1], targets=(steps[-1],))

    assert [step for step in range(1, steps[-1] + 1) if plan.is_due(step, times)] == steps


@given(per_epoch=st.integers(1, 500), times=st.integers(1, 600), epochs=st.integers(1, 4))
def test_a_cadence_by_epoch_is_the_same_in_each_epoch(per_epoch: int, times: int, epochs: int):
    plan = Plan(rows=per_epoch, steps_per_epoch=per_epoch, num_steps=per_epoch * epochs, targets=(per_epoch * epochs,))
    first = {-(-number * per_epoch // times) for number in range(1, times + 1)}

    due = {step for step in range(1, plan.num_steps + 1) if plan.is_due(step, times)}

    assert due == {epoch * per_epoch + step for epoch in range(epochs) for step in first}
    assert len(first) == min(times, per_epoch)


@pytest.mark.parametrize("changes", [{"targets": []}, {"steps_per_epoch": 0}], ids=["no chunk", "no step"])
def test_a_plan_that_is_none_is_damaged(changes: dict[str, Any]) -> None:
    plan = {"rows": 12, "steps_per_epoch": 3, "num_steps": 6, "targets": [3, 6]}
    assert Plan.read(plan, "plan.json").target(2) == 6
    with pytest.raises(DamagedError, match=f"plan.json is not readable: {next(iter(changes))}"):
        Plan.read({**plan, **changes}, "plan.json")
