"""The end of a run by its budget, decided by what the steps before took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.recipe.budget import Budget
from baton.runs.capacity import NODES
from baton.runs.documents import Progress, RunCost, RunInfo
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train.budget import EARLY, BudgetWatch
from baton.train.context import Clock
from tests.support import tiny
from tests.train.chunks import first_chunk

DECAYS = {"lr_scheduler": "warmup_stable_decay", "lr_scheduler_options": {"num_decay_steps": 4}, "max_steps": 20}
HOUR = 3600.0


class Told(Clock):
    """A clock that is set."""

    seconds_now = 0.0

    def total(self) -> float:
        return self.seconds_now


def watch(
    tmp_path: Path, budget: dict[str, Any], *, before: float = 0.0, capacity: str | None = None, **training: Any
) -> tuple[BudgetWatch, Told]:
    recipe = tiny.recipe(str(tmp_path), training={**DECAYS, **training})
    changes = {
        "budget": Budget.model_validate({"reserve": "60s", **budget}),
        "resources": recipe.resources.model_copy(update={"capacity": capacity}),
    }
    recipe = recipe.model_copy(update=changes)
    run = Run(Storage(str(tmp_path / "store")), "limited")
    run.create(recipe)
    context = replace(
        first_chunk(run), clock=Told(), plan=Plan(rows=80, steps_per_epoch=10, num_steps=20, targets=(20,))
    )
    assert isinstance(context.clock, Told)
    return BudgetWatch(context, RunCost(device_seconds=before), Progress(step=0, seconds_per_step=100)), context.clock


def first_due(watching: BudgetWatch, clock: Told) -> int:
    """Returns the first of 20 steps of a hundred seconds that decides the end, 0 for none."""
    for step in range(1, 21):
        clock.seconds_now += 100
        if watching.is_due(step, overhead=0.0):
            return step
    return 0


CASES: dict[str, tuple[dict[str, Any], float, tuple[int, int, bool]]] = {
    "money": ({"limit": "1 USD", "price": 1.0}, 0.0, (0, 0, False)),
    "money, half spent before": ({"limit": "1 USD", "price": 1.0}, HOUR / 2, (13, 17, True)),
    "a higher price": ({"limit": "1 USD", "price": 2.0}, 0.0, (13, 17, True)),
    "time": ({"limit": "30m"}, HOUR, (13, 17, True)),
    "all spent before": ({"limit": "1 USD", "price": 1.0}, HOUR, (1, 2, False)),
    "too little for the decay": ({"limit": "1 USD", "price": 1.0}, HOUR - 300, (1, 2, False)),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_of_a_hundred_seconds(case: str, tmp_path: Path) -> None:
    budget, before, (stable_until, last_step, is_decayed) = CASES[case]
    watching, clock = watch(tmp_path, budget, before=before)
    due = first_due(watching, clock)
    assert due == stable_until
    if due:
        end = watching.end_after(due)
        assert (end.last_step, end.is_decayed) == (last_step, is_decayed)
        assert end.device_seconds == before + due * 100


@pytest.mark.parametrize(
    ("capacity", "told", "before", "share", "stable_until"),
    [
        # 1 USD is half an hour on demand, and four times that on spot nodes.
        ("on-demand", None, RunCost(), 1.0, 13),
        ("spot", None, RunCost(), 0.25, 0),
        ("spot", "on-demand", RunCost(), 1.0, 13),  # a chunk that was given on-demand nodes
        ("on-demand", "spot", RunCost(), 0.25, 0),
        ("spot", None, RunCost(device_seconds=9_000, priced_seconds=1_300), 0.25, 15),  # 2,000 s on spot are left
        ("spot", None, RunCost(device_seconds=5_200, priced_seconds=1_300), 0.25, 15),
        ("spot", None, RunCost(device_seconds=1_300), 0.25, 15),  # of a Baton that knew one price
    ],
)
def test_a_spot_node_costs_its_own_price(
    capacity: str,
    told: str | None,
    before: RunCost,
    share: float,
    stable_until: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if told:
        monkeypatch.setenv(NODES, json.dumps({"karpenter.sh/capacity-type": told}))
    watching, clock = watch(tmp_path, {"limit": "1 USD", "price": {"spot": 0.5, "on_demand": 2.0}}, capacity=capacity)
    watching = BudgetWatch(watching._context, before, Progress(step=0, seconds_per_step=100))
    due = first_due(watching, clock)
    assert due == stable_until
    spent, priced_before = watching.spent(), before.priced_seconds or before.device_seconds
    assert spent["device_seconds"] == before.device_seconds + clock.seconds_now
    assert spent["priced_seconds"] == priced_before + clock.seconds_now * share


@pytest.mark.parametrize(("scheduler", "is_decayed"), [("constant", True), ("cosine", False)])
def test_a_schedule_without_a_decay_ends_after_one_step(scheduler: str, is_decayed: bool, tmp_path: Path) -> None:
    budget = {"limit": "1 USD", "price": 2.0, "reserve": "1s"}
    watching, clock = watch(tmp_path, budget, lr_scheduler=scheduler, lr_scheduler_options={})
    for step in range(1, 18):
        assert not watching.is_due(step - 1, overhead=0.0)
        clock.seconds_now += 100
    assert watching.is_due(17, overhead=0.0)
    end = watching.end_after(17)
    assert (end.last_step, end.is_decayed, end.reason) == (18, is_decayed, "budget.limit: 1 USD")


@pytest.mark.parametrize(
    ("limit", "step"),
    [
        ("10 USD", None),  # pays for all
        # 3,600 s pay for 35 steps of 100 s and the reserve.
        ("1 USD", 35),
    ],
)
def test_an_early_end_is_foreseen_once(limit: str, step: int | None, tmp_path: Path) -> None:
    watching, clock = watch(tmp_path, {"limit": limit, "price": 1.0})
    long = Plan(rows=800, steps_per_epoch=100, num_steps=100, targets=(100,))
    watching._context = replace(watching._context, plan=long)
    told = []
    for at in range(1, 31):
        clock.seconds_now += 100
        assert not watching.is_due(at, overhead=0.0)
        told.append(watching.foresee(at, overhead=0.0))
    known = [(at, event.step, event.of) for at, event in enumerate(told, 1) if event]
    assert known == ([] if step is None else [(EARLY + 1, step, 100)])


RAISED = {
    "enough": ({"limit": "2 USD", "price": 1.0}, 1),
    "the same": ({"limit": "1 USD", "price": 1.0}, 0),
    "spent by the decay": ({"limit": "1.1 USD", "price": 1.0}, 0),
    "over by now": ({"limit": "1h"}, 0),
    "none": (None, 1),
}


@pytest.mark.parametrize("case", RAISED)
def test_a_budget_that_pays_for_more_voids_the_end(case: str, tmp_path: Path) -> None:
    budget, voided = RAISED[case]
    watching, clock = watch(tmp_path, {"limit": "1 USD", "price": 1.0}, before=HOUR - 900)
    clock.seconds_now += 400
    assert watching.is_due(4, overhead=0.0)
    run, recipe = watching._context.run, watching._context.recipe
    end = run.decide_end(run.need(RunInfo), watching.end_after(4))
    assert end.span == (4, 8)
    run.write(Progress(step=8, seconds_per_step=100, started=1.0, device_seconds=HOUR))
    run.create(recipe.model_copy(update={"budget": Budget.model_validate(budget) if budget else None}))
    assert run.need(RunInfo).voided == voided
