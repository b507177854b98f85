"""The forecast of a run: sums by hand, and interruptions against a simulation event by event."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.training import Training
from baton.runs.forecast import NEUTRAL, Measured, forecast, is_alike, measured
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.runs.test_bill import at, attempt

STEPS, CHUNKS = 1000, 10
DAY = 86400.0
KNOWN = Measured(
    source="a run",
    paces=(2.0,),
    first_start=30.0,
    start=20.0,
    end=5.0,
    pause=4.0,
    before=60.0,
    after=100.0,
    save=1.0,
    plan=Plan(rows=8000, steps_per_epoch=1000, num_steps=STEPS, targets=(STEPS,)),
)
FIXED = 30 + (CHUNKS - 1) * 20 + CHUNKS * 5  # seconds of starts and ends


def recipe(**changes: Any) -> Recipe:
    document: dict[str, Any] = {
        "name": "t",
        "model": {"base": "m"},
        "data": {"source": "r.jsonl"},
        "training": {"method": "sft", "max_steps": STEPS, "batch_size": 8},
        "chunks": {"count": CHUNKS},
    }
    return load.with_values(load.validate(document, origin="t"), changes)


def test_without_interruptions_it_is_the_sum_of_the_parts() -> None:
    told = forecast(recipe(), KNOWN)
    process = STEPS * 2 + FIXED
    whole = process + 60 + (CHUNKS - 1) * 4 + 100
    # 90% of times that are uniform from 10% less to 10% more.
    assert told.device_seconds == pytest.approx((process, 0.91 * process, 1.09 * process), rel=1e-3)
    assert told.seconds == pytest.approx((whole, 0.91 * whole, 1.09 * whole), rel=1e-3)
    assert (told.on_demand, told.without_checkpoints) == (process, STEPS * 2 + 30)
    assert (told.steps, told.interval, told.best_interval, told.affordable_steps) == (STEPS, 200, None, None)
    saved = forecast(recipe(**{"chunks.checkpoint_every": 50}), KNOWN)
    assert saved.device_seconds.expected == pytest.approx(process + 10)  # ten more saves


def test_the_range_follows_the_paces_and_a_price_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runs.forecast.VARIES", 0.0)
    told = forecast(recipe(), replace(KNOWN, paces=(1.8, 2.2)))
    assert told.device_seconds.expected == pytest.approx(STEPS * 2 + FIXED, rel=0.01)
    # 90% of paces that are uniform from 1.8 to 2.2 s.
    assert told.device_seconds.low == pytest.approx(STEPS * 1.82 + FIXED, rel=0.005)
    assert told.device_seconds.high == pytest.approx(STEPS * 2.18 + FIXED, rel=0.005)
    spot = {"budget": {"limit": "99 USD", "price": {"spot": 1.0, "on_demand": 4.0}}, "resources.capacity": "spot"}
    priced = forecast(recipe(**spot, **{"resources.gpus": 2}), KNOWN)
    assert priced.device_seconds.expected == (STEPS * 2 + FIXED) * 2 / 4
    assert priced.on_demand == (STEPS * 2 + FIXED) * 2


def test_evaluations_that_the_pace_leaves_out_are_added() -> None:
    told = forecast(recipe(**{"evaluation.every": 30}), replace(KNOWN, evaluation=6.0))
    assert told.device_seconds.expected == pytest.approx(STEPS * 2 + FIXED + 33 * 6)
    told = forecast(recipe(**{"evaluation.per_epoch": 4}), replace(KNOWN, evaluation=6.0))
    assert told.device_seconds.expected == pytest.approx(STEPS * 2 + FIXED + 4 * 6)


def _event_by_event(rate: float, length: float, start: float, segments: int) -> list[float]:
    """Returns the seconds of 4,000 runs that repeat each segment until it passes without an interruption."""
    chance, runs = random.Random(1), []
    for _ in range(4000):
        seconds = 0.0
        for _ in range(segments):
            while (until := chance.expovariate(rate)) < length:
                seconds += until + start
            seconds += length
        runs.append(seconds)
    return runs


@pytest.mark.parametrize("per_day", [2.0, 24.0, 200.0])
def test_interruptions_cost_what_a_simulation_event_by_event_costs(
    per_day: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.runs.forecast.VARIES", 0.0)
    told = forecast(recipe(**{"resources.interruptions_per_day": per_day}), KNOWN)
    runs = _event_by_event(per_day / DAY, 201.0, 20.0, CHUNKS)  # with the save
    fixed = FIXED - CHUNKS  # its saves are in the segments
    assert told.device_seconds.expected == pytest.approx(fixed + fmean(runs), rel=0.02)
    cuts = quantiles(runs, n=20)
    assert told.device_seconds.high == pytest.approx(fixed + cuts[-1], rel=0.06)
    alone = _event_by_event(per_day / DAY, STEPS * 2 + 30.0, 20.0, 1) if per_day < 100 else []
    if alone:
        assert told.without_checkpoints == pytest.approx(fmean(alone), rel=0.05)
    else:  # e to the power of 4.7, and the mean is of few long runs
        assert told.without_checkpoints > 10 * told.device_seconds.expected


def test_the_best_interval_is_the_cheapest_of_its_neighbours() -> None:
    best = forecast(recipe(**{"resources.interruptions_per_day": 40.0}), KNOWN).best_interval
    assert best == pytest.approx(math.sqrt(2 * 1.0 * DAY / 40))
    costs = {}
    for factor in (0.1, 1.0, 4.0):
        every = {"chunks.checkpoint_every": f"{best * factor:.0f}s", "chunks.count": 1}
        told = forecast(recipe(**every, **{"resources.interruptions_per_day": 40.0}), KNOWN)
        costs[factor] = told.device_seconds.expected
        assert (told.excess > 0.01) == (factor != 1.0)
    assert min(costs, key=lambda factor: costs[factor]) == 1.0


DECAY = {
    "training.lr_scheduler": "warmup_stable_decay",
    "training.lr_scheduler_options": {"num_decay_steps": 100},
}


@pytest.mark.parametrize(
    ("limit", "affordable", "fits"),
    [
        ("1 USD", None, True),
        ("0.5 USD", 1000 * (1800 - 60) // 2260, True),
        ("0.08 USD", 1000 * (288 - 60) // 2260, False),  # the decay takes 202 s after a start of 30 s
        ("0.09 USD", 1000 * (324 - 60) // 2260, True),
        ("2900s", None, True),
        ("1130s", 1000 * (1130 - 60) // 2260, True),
    ],
)
def test_a_budget_pays_for_some_steps_or_for_none(limit: str, affordable: int | None, fits: bool) -> None:
    price = {"price": 1.0} if "USD" in limit else {}
    told = forecast(recipe(budget={"limit": limit, "reserve": "60s", **price}, **DECAY), KNOWN)
    assert (told.affordable_steps, told.fits) == (affordable, fits)


NEIGHBOURS: dict[str, tuple[dict[str, Any], bool]] = {
    "the same": ({}, True),
    "another rate": ({"training.learning_rate": 1e-3}, True),
    "another length": ({"training.max_steps": 77, "seed": 9}, True),
    "another name and store": ({"name": "u", "store.uri": "elsewhere"}, True),
    "another batch": ({"training.batch_size": 16}, False),
    "longer rows": ({"data.max_length": 77}, False),
    "another model": ({"model.base": "n"}, False),
    "an adapter": ({"adapter": {"r": 4}}, False),
    "a GPU": ({"resources.gpus": 1}, False),
    "two nodes": ({"resources.nodes": 2}, False),
    "another precision": ({"training.precision": "bf16"}, False),
}


@pytest.mark.parametrize("case", NEIGHBOURS)
def test_a_run_tells_of_its_own_kind_alone(case: str) -> None:
    changes, alike = NEIGHBOURS[case]
    assert is_alike(recipe(**changes), recipe()) is alike


def test_each_setting_that_costs_no_time_is_one() -> None:
    assert set(Training.model_fields) >= NEUTRAL


def test_a_run_is_measured_by_its_whole_attempts(tmp_path: Path) -> None:
    run = Run(Storage(str(tmp_path)), "before")
    run.create(recipe())
    run.write(KNOWN.plan)
    assert measured(run, "it") is None
    run.record("train-chunk-001", attempt(100, (0, 30), "killed", start=10, train=60))
    run.record("train-chunk-001", attempt(250, (20, 50), start=12, train=60, save=3))
    run.record("train-chunk-002", attempt(330, (50, 90), start=8, restore=2, train=60, save=5))
    run.put("recipe.json", {**run.raw("recipe.json"), "created": at(5)})
    for stage, end, seconds in (("data-split", 12, 5), ("tokenize", 22, 6), ("evaluate", 360, 20), ("export", 372, 10)):
        run.record(stage, {"seconds": seconds, "at": at(end)})
    known = measured(run, "it")
    assert known
    assert known.paces == (2.0, 1.5)
    assert (known.first_start, known.start, known.end, known.pause) == (12, 10, 4, 5)
    # The first process began at 30 s, the run at 5 s; the stages after training end 42 s after the last chunk.
    assert (known.before, known.after) == (25, 42)
    assert known.interruptions_per_day == pytest.approx(DAY / (70 + 75 + 75))
