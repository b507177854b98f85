"""The budget of a recipe: its amounts, and settings that do not go with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.budget import Budget
from baton.recipe.recipe import Recipe
from baton.runs.run import identity

RECIPE = str(Path(__file__).parent.parent / "recipes/scratch.yaml")
DECAYS = ["training.lr_scheduler=warmup_stable_decay", "training.lr_scheduler_options={num_decay_steps: 4}"]


def read(*changes: str) -> Recipe:
    return load.load(RECIPE, list(changes))


AMOUNTS: dict[str, tuple[dict[str, Any], tuple[float | None, ...]]] = {
    "money": ({"limit": "40 USD", "price": 2.5}, (57600.0, None, None)),
    "money in one word": ({"limit": "40EUR", "price": 10}, (14400.0, None, None)),
    "money by capacity": ({"limit": "40 USD", "price": {"spot": 1, "on_demand": 2.5}}, (57600.0, None, None)),
    "device time": ({"limit": "1.5 gpu-hours"}, (5400.0, None, None)),
    "time": ({"limit": "90m"}, (None, 5400.0, None)),
    "moment": ({"by": "2026-12-01T18:00Z"}, (None, None, 1796148000.0)),
    "moment elsewhere": ({"by": "2026-12-01T19:00+01:00"}, (None, None, 1796148000.0)),
}


@pytest.mark.parametrize("case", AMOUNTS)
def test_an_amount(case: str) -> None:
    given, expected = AMOUNTS[case]
    budget = Budget.model_validate(given)
    assert (budget.device_seconds, budget.run_seconds, budget.ends_at) == expected


SWEEP, MONEY = "sweep={parameters: {seed: [1, 2]}}", ("budget.limit=4 USD", "budget.price=2")
REFUSED = {
    "no price": (["budget.limit=40 USD"], "price of a device is not known"),
    "no price on demand": (["budget.limit=40 USD", "budget.price={spot: 1}"], "price.on_demand: missing"),
    "no capacity": (["budget.limit=4 USD", "budget.price={spot: 1, on_demand: 2}"], "resources.capacity, which tells"),
    "no money": (["budget.limit=6h", "budget.price=2"], "nothing is counted in money"),
    "nothing": (["budget={}"], "give limit or by"),
    "words": (["budget.limit=6 hours"], "did you mean '6h'"),
    "zero": (["budget.limit=0 gpu-hours"], "expected an amount"),
    "no zone": (["budget.by=2026-12-01T18:00"], "expected a time with its zone"),
    "no GPU": (["budget.limit=6 gpu-hours"], "resources.gpus is 0"),
    "no decay": (["budget.limit=6h", DECAYS[0]], "give num_decay_steps"),
    "no length": (["budget.limit=6h", "training.lr_scheduler=auto", "training.epochs=1"], "give num_decay_steps"),
    "no number": (["budget.limit=6h", DECAYS[0], "training.lr_scheduler_options={num_decay_steps: x}"], "give num_dec"),
    "fixed": (
        ["budget.limit=6h", DECAYS[0], "training.lr_scheduler_options={num_decay_steps: 4, num_stable_steps: 4}"],
        "num_stable_steps fixes",
    ),
    "share": (["budget.limit=6h", *DECAYS, "training.warmup_steps=0.1"], "is a share of all steps"),
    "curriculum": (["budget.limit=6h", "training.curriculum={}"], "training.curriculum: does not go with budget"),
    "no end": (["budget.limit=6h", "resources.capacity=spot-first"], "set budget.by"),
    "no budget": (["resources.capacity=spot-first"], "set budget.by"),
    "several pods": (
        ["budget.by=2026-12-01T18:00Z", "resources.capacity=spot-first", "resources.nodes=2"],
        "spot-first does not go with resources.nodes",
    ),
    "time of a sweep": (["budget.limit=6h", SWEEP], "counts from the first chunk of one run"),
    "brackets": ([*MONEY, SWEEP, "sweep.method=optuna"], "set sweep.brackets to 1"),
    "hyperband": ([*MONEY, SWEEP, "sweep.method=random", "sweep.hyperband={eta: 2}"], "set sweep.brackets to 1"),
    "shared": ([*MONEY, SWEEP, "sweep.device=shared"], "leave sweep.device out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        read(*changes)


SCHEDULES = {
    "without a budget": ([], ("linear", {})),
    "with one": (
        ["budget.limit=6h", "training.epochs=null", "training.max_steps=45"],
        ("warmup_stable_decay", {"num_decay_steps": 4}),
    ),
    "of few steps": (
        ["budget.limit=6h", "training.epochs=null", "training.max_steps=3"],
        ("warmup_stable_decay", {"num_decay_steps": 1}),
    ),
    "with a decay of its own": (
        [
            "budget.limit=6h",
            "training.epochs=null",
            "training.max_steps=45",
            "training.lr_scheduler_options={num_decay_steps: 9}",
        ],
        ("warmup_stable_decay", {"num_decay_steps": 9}),
    ),
    "of epochs": (
        ["budget.limit=6h", "training.lr_scheduler_options={num_decay_steps: 9}"],
        ("warmup_stable_decay", {"num_decay_steps": 9}),
    ),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_that_is_chosen(case: str) -> None:
    changes, expected = SCHEDULES[case]
    training = read("training.lr_scheduler=auto", *changes).training
    assert (training.lr_scheduler, training.lr_scheduler_options) == expected


MORE = {
    "more": ("7h", "6h", True),
    "the same": ("60m", "1h", False),
    "less": ("5h", "6h", False),
    "another unit": ("6h", "6 gpu-hours", True),
}


@pytest.mark.parametrize("case", MORE)
def test_a_budget_that_allows_more(case: str) -> None:
    ours, theirs, expected = MORE[case]
    assert Budget(limit=ours).allows_more(Budget(limit=theirs)) == expected


def test_it_is_no_part_of_the_identity_and_absent_without_one() -> None:
    limited, plain = read("budget.limit=6h", *DECAYS), read(*DECAYS)
    assert identity(limited) == identity(plain)
    assert "budget" not in plain.model_dump(mode="json")
    assert load.loads(load.dumps(limited)) == limited
