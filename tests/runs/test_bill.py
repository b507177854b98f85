"""The bill of a run, against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.recipe import load
from baton.recipe.budget import Budget
from baton.runs.bill import bill
from baton.runs.documents import Progress
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.support import tiny

SPOT = {"spot": 0.5, "on_demand": 2.0}
EVALUATED = [{"stage": "evaluate", "seconds": 20.0}, {"stage": "export", "seconds": 10.0}]
EPOCH = 1_800_000_000.0  # 2027-01-15T08:00:00Z


def at(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"2027-01-15T08:{minutes:02.0f}:{rest:06.3f}+00:00"


def attempt(end: float, steps: tuple[int, int], outcome: str = "done", price: float = 1.0, **seconds: float) -> Any:
    """An attempt that ends at a time, in seconds; `rest` is in no phase, such as the last upload."""
    rest = seconds.pop("rest", 0.0)
    times = {"seconds": seconds, "total_seconds": sum(seconds.values()) + rest, "price": price}
    return {"chunk": 1, "at": at(end), "from_step": steps[0], "to_step": steps[1], "outcome": outcome, **times}


def made(tmp_path: Path, attempts: list[Any], stages: list[Any], **resources: Any) -> Any:
    recipe = tiny.recipe(str(tmp_path))
    changes = {
        "budget": Budget.model_validate({"limit": "40 USD", "price": SPOT}),
        "resources": recipe.resources.model_copy(update={"capacity": "on-demand", **resources}),
    }
    run = Run(Storage(str(tmp_path / "store")), "billed")
    run.create(recipe.model_copy(update=changes))
    run.write(Progress(step=0, started=EPOCH))
    for record in attempts:
        run.record("train-chunk-001", record)
    for record in stages:
        run.record(record["stage"], record)
    paid = bill(run)
    assert paid
    return paid


CASES: dict[str, tuple[list[Any], list[Any], dict[str, Any], dict[str, float]]] = {
    "one attempt": (
        [attempt(120, (0, 10), start=10, train=100, save=5)],
        EVALUATED,
        {},
        # It waited 5 s for its node.
        {
            "kept": 100,
            "lost": 0,
            "starting": 10,
            "saving": 5,
            "after": 30,
            "total": 145,
            "waited": 5,
            "on_demand": 140,
            "script": 140,
        },
    ),
    # On two GPUs: the first half of its steps was saved. W is 100 and a mean start of 12.5; the mean price is
    # (90 × 0.25 + 80) / 170.
    "killed on spot, then on demand": (
        [
            attempt(200, (0, 8), "killed", price=0.25, start=10, train=80),
            attempt(300, (4, 10), start=12, restore=3, train=60, rest=5),
        ],
        EVALUATED,
        {"gpus": 2, "capacity": "spot"},
        {
            "kept": 2 * (40 * 0.25 + 60),
            "lost": 20,
            "starting": 2 * (2.5 + 15),
            "saving": 10,
            "after": 60 * 0.25,
            "waited": 130,
            "on_demand": 2 * 112.5 + 60,
            "script": 2 * (90 * 0.25 + 112.5 * 102.5 / 170) + 60 * 0.25,
        },
    ),
    # The decay from step 4 was given up for a larger budget.
    "an end that was withdrawn": (
        [attempt(60, (0, 6), "finished", train=60), attempt(120, (4, 10), train=60)],
        [],
        {},
        {"kept": 100, "lost": 20, "total": 120, "on_demand": 100, "script": 100, "waited": 0},
    ),
    "preempted, its work saved": (
        [attempt(60, (0, 6), "partial", start=5, train=55), attempt(120, (6, 10), start=5, train=55)],
        [],
        {},
        {"kept": 110, "lost": 0, "starting": 10, "on_demand": 115, "script": 60 + 115},
    ),
    "found its work done": (
        [attempt(60, (0, 10), start=5, train=55), attempt(70, (10, 10), "already_done", start=4)],
        [],
        {},
        {"kept": 55, "starting": 9, "total": 64, "on_demand": 60, "script": 60, "waited": 6},
    ),
    # W of 153 s is over before the second kill.
    "kills after a script's end": (
        [
            attempt(50, (0, 5), "killed", train=50),
            attempt(260, (4, 7), "killed", train=110, rest=100),
            attempt(300, (6, 9), train=40),
        ],
        [],
        {},
        {"kept": 40 + 110 * 2 / 3 + 40, "lost": 10 + 110 / 3, "script": 50 + 40 + 110 * 2 / 3 + 40},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bill_is_the_sum_by_hand(case: str, tmp_path: Path) -> None:
    attempts, stages, resources, expected = CASES[case]
    paid = made(tmp_path, attempts, stages, **resources)
    assert {name: getattr(paid, name) for name in expected} == pytest.approx(expected)


def test_an_interruption_costs_its_lost_steps_and_the_next_start(tmp_path: Path) -> None:
    attempts, stages, resources, _ = CASES["killed on spot, then on demand"]
    paid = made(tmp_path, attempts, stages, **resources)
    (cut,) = paid.interruptions
    assert (cut.chunk, cut.step, cut.outcome, cut.repeated) == (1, 8, "killed", 4)
    assert cut.seconds == pytest.approx(2 * (40 * 0.25 + 15))
    told = paid.to_json()
    # 2 USD an hour on demand.
    assert (told["total"], told["on_demand"], told["script"]) == ("0.12 USD", "0.16 USD", "0.11 USD")
    assert told["interruptions"] == [
        {"chunk": 1, "step": 8, "outcome": "killed", "repeated_steps": 4, "cost": "0.03 USD"}
    ]
    assert paid.words.startswith("0.12 USD: steps kept 0.08 USD, steps lost 0.01 USD, starts 0.02 USD")


def test_the_comment_on_a_pull_request_has_the_bill(tmp_path: Path) -> None:
    attempts, stages, resources, _ = CASES["killed on spot, then on demand"]
    paid = made(tmp_path, attempts, stages, **resources)
    store, recipe, result = (str(tmp_path / name) for name in ("store", "recipe.yaml", "result.json"))
    Path(recipe).write_text(load.dumps(Run(Storage(store), "billed").recipe()))
    Path(result).write_text(json.dumps({"run": "billed", "state": "succeeded"}))
    done = CliRunner().invoke(app, ["kfp", "summary", recipe, "--result", result, "--store", store])
    assert done.exit_code == 0, done.output
    assert f"\nCost {paid.words}.\n" in done.output


def test_there_is_no_bill_without_a_budget_or_an_attempt(tmp_path: Path) -> None:
    recipe = tiny.recipe(str(tmp_path))
    run = Run(Storage(str(tmp_path / "store")), "free")
    assert bill(run) is None
    run.create(recipe)
    run.record("train-chunk-001", attempt(60, (0, 6), train=60))
    assert bill(run) is None
    limited = Run(Storage(str(tmp_path / "store")), "limited")
    limited.create(recipe.model_copy(update={"budget": Budget(limit="6h")}))
    assert bill(limited) is None
