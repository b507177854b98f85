"""A sweep in MLflow: a parent run with the scores of each rung, and the trials' runs below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.recipe import load
from baton.runs.outcomes import RungEntry, RungVerdict, StoppedTrial, SweepHead, TrialEntry, TrialInfo, Winner
from baton.runs.run import Run, Sweep
from baton.store.storage import Storage
from baton.sweep import trials
from baton.tracking import tracking_run
from baton.tracking.client import connect

pytestmark = pytest.mark.slow


def test_trials_are_children_and_rungs_are_metrics_of_the_parent(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    document = {
        "name": "swept",
        "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": "rows.jsonl"},
        "training": {"max_steps": 8},
        "tracking": {"mlflow": uri},
        "sweep": {"parameters": {"training.learning_rate": [1e-4, 1e-3]}},
    }
    recipe = load.validate(document, origin="test")
    sweep = Sweep(Storage(str(tmp_path / "store")), "s")
    parent = trials.tracking_parent(sweep, recipe)
    assert parent is not None
    assert trials.tracking_parent(sweep, recipe) == parent  # made once
    run = Run(sweep.storage, "s-t000")
    run.put(TrialInfo.NAME, {"sweep": "s", "id": "t000", "tracking": parent})
    tracking_run.start(run, recipe)
    scores = {"t000": {"value": 2.5, "step": 4}, "t001": {"value": 2.25, "step": 4}, "t002": {"value": None, "step": 4}}
    rung = RungVerdict.model_validate({"rung": 1, "scores": scores, "kept": ["t001"], "stopped": []})
    trials.log_rung(sweep, recipe, rung, "<p>page</p>", is_last=False)
    client = connect(uri)
    child = client.get_run(run.require("tracking.json")["run_id"])
    assert child.data.tags["mlflow.parentRunId"] == parent
    assert child.info.experiment_id == client.get_run(parent).info.experiment_id
    assert client.get_run(parent).data.metrics == {"t000": 2.5, "t001": 2.25, "best": 2.25}
    assert [metric.step for metric in client.get_metric_history(parent, "best")] == [4]
    assert [file.path for file in client.list_artifacts(parent)] == ["recipe.yaml", "sweep.html"]
    assert client.get_run(parent).data.params == {
        "sweep.parameters.training.learning_rate": "0.0001, 0.001"  # and no default of the sweep's
    }
    assert client.get_run(parent).info.status == "RUNNING"
    trials.log_rung(sweep, recipe, rung, "<p>page</p>", is_last=True)
    assert client.get_run(parent).info.status == "FINISHED"

    rungs = [RungEntry(rung=1, chunk=1, keep=2), RungEntry(rung=2, chunk=2, keep=1)]
    rows = [TrialEntry(id="t000", run="s-t000"), TrialEntry(id="t001", run="s-t001")]
    head = SweepHead(name="s", created="", recipe={}, metric="loss", mode="min", rungs=rungs, trials=rows)
    other = Run(sweep.storage, "s-t001")
    other.put(TrialInfo.NAME, {"sweep": "s", "id": "t001", "tracking": parent})
    other.create(recipe)
    tracking_run.start(other, recipe)

    def ends() -> list[tuple[str, str | None]]:
        found = [client.get_run(each.require("tracking.json")["run_id"]) for each in (run, other)]
        return [(each.info.status, each.data.tags.get("baton.stopped")) for each in found]

    sweep.write(RungVerdict(rung=1, chunk=1, kept=["t001", "t000"]), 1)
    trials.end_trials(sweep, head, RungVerdict(rung=1, chunk=1, kept=["t001", "t000"]), is_last=False)
    assert ends() == [("RUNNING", None), ("RUNNING", None)]
    last = RungVerdict(rung=2, chunk=2, kept=["t001"], stopped=[StoppedTrial(id="t000", why="number 2 of 2")])
    sweep.write(last, last.rung)
    sweep.write(Winner(id="t001"))
    trials.end_trials(sweep, head, last, is_last=True)
    assert ends() == [("FINISHED", "number 2 of 2"), ("RUNNING", None)]  # the winner's report ends it


def test_nothing_is_tracked_where_the_recipe_says_so(tmp_path: Path) -> None:
    document = {
        "name": "swept",
        "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": "rows.jsonl"},
        "tracking": {"mlflow": None},
        "sweep": {"parameters": {"training.learning_rate": [1e-4, 1e-3]}},
    }
    recipe = load.validate(document, origin="test")
    assert trials.tracking_parent(Sweep(Storage(str(tmp_path / "store")), "s"), recipe) is None
