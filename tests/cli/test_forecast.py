"""`baton check` and `submit` tell time and price beforehand, by an earlier run or a probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import baton
from baton.cli.app import app
from baton.runs.plan import Plan, make_plan
from baton.runs.run import Run
from baton.source import prepare
from baton.store.storage import Storage
from tests.runs.test_bill import attempt

RECIPE = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
STEPS, STEP_S = 100, 4.0
SETTINGS = [f"training.max_steps={STEPS}", "training.epochs=null", "chunks.count=2", "training.lr_scheduler=constant"]


def check(store: Path, *options: str, settings: list[str] | None = None) -> tuple[int, dict[str, Any]]:
    changes = [word for setting in settings or SETTINGS for word in ("--set", setting)]
    arguments = ["check", RECIPE, "--only", "forecast", "--store", str(store), "--json", *changes, *options]
    ended = CliRunner().invoke(app, arguments)
    return ended.exit_code, json.loads(ended.stdout)


def earlier(store: Path, name: str, at: float, step_s: float, **settings: Any) -> None:
    """Makes a run of the recipe that has ended, each of its steps having taken as long."""
    changes = [*SETTINGS, *(f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items())]
    recipe = prepare.load(RECIPE, changes, store=str(store)).localised()
    run = Run(Storage(str(store)), name)
    run.create(recipe)
    run.write(make_plan(recipe, 400))
    for chunk, end in enumerate((50, 100)):
        record = attempt(at + chunk * 300, (end - 50, end), start=10, train=50 * step_s, save=5)
        run.record(f"train-chunk-{chunk + 1:03d}", record)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    earlier(tmp_path, "scratch-a", 600, STEP_S)
    earlier(tmp_path, "other-batch", 600, 9 * STEP_S, training__batch_size=2)
    return tmp_path


def test_an_earlier_run_of_the_store_tells(store: Path) -> None:
    code, answer = check(store)
    assert (code, answer["state"]) == (0, "ready")
    told = answer["forecast"]
    assert (told["source"], told["steps"], told["step"]) == ("run scratch-a of this store", STEPS, STEP_S)
    process = STEPS * STEP_S + 30
    assert told["device_seconds"] == pytest.approx([process, 0.91 * process, 1.09 * process], rel=1e-3)
    code, answer = check(store, settings=[*SETTINGS, "training.batch_size=2"])
    assert answer["forecast"]["source"] == "run other-batch of this store"


def test_without_one_there_is_no_forecast(store: Path) -> None:
    code, answer = check(store, settings=[*SETTINGS, "training.batch_size=4"])
    assert (code, "forecast" in answer) == (0, False)
    code, answer = check(store / "nothing")
    assert (code, "forecast" in answer) == (0, False)


BUDGET = ["budget.limit=0.01 USD", "budget.reserve=10s"]


@pytest.mark.parametrize(("price", "fits"), [(1.0, True), (3.0, False)])
def test_a_budget_that_pays_for_no_run_is_refused(price: float, fits: bool, store: Path) -> None:
    settings = [*SETTINGS, *BUDGET, f"budget.price={price}"]
    code, answer = check(store, settings=settings)
    assert (code, answer["state"]) == ((0, "ready") if fits else (1, "problems"))
    assert answer["problems"] == ([] if fits else ["budget"])
    # 36 s at 1 USD an hour pay for 10 s of start and 6 steps beside the reserve.
    assert answer["forecast"]["affordable_steps"] == (int(100 * 26 / 430) if fits else int(100 * 2 / 430))


def test_submit_refuses_it_before_it_asks_kubeflow(store: Path) -> None:
    changes = [word for setting in [*SETTINGS, *BUDGET, "budget.price=3.0"] for word in ("--set", setting)]
    arguments = ["kfp", "submit", RECIPE, "--endpoint", "http://127.0.0.1:9", "--store", str(store), *changes]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 2
    words = " ".join(ended.stderr.split())
    assert "0.01 USD does not pay for a step, the decay of the learning rate, and evaluation and export" in words
    assert "The whole run takes about 8 min 35 s and 0.36 USD" in words


@pytest.mark.slow
def test_a_probe_measures_the_recipe_here(tmp_path: Path) -> None:
    settings = [*SETTINGS, "chunks.checkpoint_every=5"]
    code, answer = check(tmp_path, "--probe", settings=settings)
    told = answer["forecast"]
    assert (code, told["source"], told["steps"]) == (0, "20 steps here", STEPS)
    assert not (tmp_path / "runs").exists()
    loaded = baton.load(RECIPE, settings, store=str(tmp_path))
    result = baton.run(loaded, "real")
    assert result["steps"] == STEPS
    plan = Run(Storage(str(tmp_path)), "real").need(Plan)
    assert plan.num_steps == told["steps"]
    code, answer = check(tmp_path, settings=settings)
    assert answer["forecast"]["source"] == "run real of this store"
    print(f"probe: {told['device_seconds'][0]:.1f} s, real run: {answer['forecast']['device_seconds'][0]:.1f} s")
