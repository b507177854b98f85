"""The plan: where chunks end follows from a few numbers."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from components.shared import recipe_file
from components.shared.errors import UserError
from components.shared.plan import Plan, make_plan
from components.shared.recipe import Recipe

TEMPLATE: dict[str, Any] = {
    "name": "tiny",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
}


def recipe(count: int = 1, **training: Any) -> Recipe:
    """A recipe with so many chunks."""
    document = copy.deepcopy({**TEMPLATE, "chunks": {"count": count}, "training": training})
    return recipe_file.validate(document, origin="r.yaml")


CASES = {
    "one epoch": (100, 1, {"batch_size": 10}, 10, 10, (10,)),
    "last batch smaller": (101, 2, {"batch_size": 10}, 11, 11, (6, 11)),
    "epochs": (100, 4, {"batch_size": 10, "epochs": 2}, 10, 20, (5, 10, 15, 20)),
    "part of an epoch": (100, 2, {"batch_size": 10, "epochs": 0.25}, 10, 3, (2, 3)),
    "steps": (100, 3, {"batch_size": 10, "max_steps": 7}, 10, 7, (3, 5, 7)),
    "a step each": (8, 4, {"batch_size": 2}, 4, 4, (1, 2, 3, 4)),
    "fewer rows than a batch": (3, 1, {"batch_size": 8}, 1, 1, (1,)),
}


@pytest.mark.parametrize(("rows", "count", "training", "per_epoch", "steps", "targets"), CASES.values(), ids=CASES)
def test_plan(rows: int, count: int, training: Any, per_epoch: int, steps: int, targets: tuple[int, ...]):
    expected = Plan(rows=rows, steps_per_epoch=per_epoch, num_steps=steps, targets=targets)

    assert make_plan(recipe(count, **training), rows) == expected


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
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_more_chunks_than_steps():
    with pytest.raises(UserError) as caught:
        make_plan(recipe(5, batch_size=10), 40)

    assert str(caught.value) == (
        "chunks.count is 5, but 40 rows at batch_size 10 give 4 steps. Use at most 4 chunks, or train longer."
    )


def test_no_rows():
    with pytest.raises(UserError, match="no training rows are left after the split"):
        make_plan(recipe(), 0)
