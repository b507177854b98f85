"""Tracking: one MLflow run, metrics from another process, and a server that is away holds nothing up."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton import events
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import TrackingRun
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.tracking import messages, tracking_run
from baton.tracking import tracker as trackers
from baton.tracking.client import connect
from baton.tracking.tracker import Tracker

SENDER = "baton.tracking.client"
RECIPE = {
    "name": "tracked",
    "model": {"from_scratch": {}, "tokenizer": {"train": {}}},
    "data": {"source": "builtin:stdlib-docs"},
}


def _run(tmp_path: Path, uri: str) -> Run:
    recipe = load.validate({**RECIPE, "tracking": {"mlflow": uri}}, origin="test")
    run = Run(Storage(str(tmp_path / "store")), "r")
    run.create(recipe)
    tracking_run.start(run, recipe)
    return run


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks hold nothing back, as those that last."""
    monkeypatch.setattr(trackers, "HELD_S", 0.0)


@pytest.mark.slow
def test_steps_go_on_in_one_run_with_system_metrics(tmp_path: Path, at_once: None) -> None:
    path = tmp_path / "mlflow.db"
    run = _run(tmp_path, f"sqlite:///{path}")
    database = sqlite3.connect(path)
    for first in (1, 3):
        with Tracker(run, trains=first == 1) as tracker:
            tracker.log({"loss": 9.0 - first}, first)
            tracker.log({"loss": 8.0 - first}, first + 1)
            if first == 1:
                _wait_for(database, "select count(*) from metrics where key like 'system/%'")
    tracking_run.close(run, "FINISHED")
    rows = database.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
    assert rows == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 5.0)]
    assert database.execute("select name, status from runs").fetchall() == [("r", "FINISHED")]
    parameters = dict(database.execute("select key, value from params").fetchall())
    assert parameters["training.method"] == "sft"


def test_the_use_of_gpus_is_that_of_all_samples(tmp_path: Path) -> None:
    run = _run(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    assert tracking_run.gpu_use(run) is None, "nothing was recorded"
    tracking, client = run.need(TrackingRun), connect(f"sqlite:///{tmp_path}/mlflow.db")
    for gpu, percent, megabytes in (("gpu_0", 80, 9000), ("gpu_0", 100, 9500), ("gpu_1", 60, 8000)):
        client.log_metric(tracking.run_id, f"system/{gpu}_utilization_percentage", percent)
        client.log_metric(tracking.run_id, f"system/node-1/{gpu}_memory_usage_megabytes", megabytes)
    assert tracking_run.gpu_use(run) == tracking_run.GpuUse(80.0, 9500.0)


def _wait_for(database: sqlite3.Connection, query: str) -> None:
    end = time.monotonic() + 60
    while not database.execute(query).fetchone()[0]:
        assert time.monotonic() < end, "no system metrics in a minute"
        time.sleep(0.5)


@pytest.mark.slow
def test_a_fork_is_below_its_parent_and_a_trials_fork_below_the_sweep(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    parent = _run(tmp_path, uri)
    recipe = parent.recipe()

    def tags(name: str, own: Recipe, **documents: dict[str, str]) -> dict[str, str]:
        run = Run(parent.storage, name)
        run.put("fork.json", {"parent": parent.uri, "step": 40, "warm": True})
        for document, content in documents.items():
            run.put(f"{document}.json", content)
        tracking_run.start(run, own)
        found: dict[str, str] = connect(uri).get_run(run.require("tracking.json")["run_id"]).data.tags
        return {name: found[name] for name in found if name.startswith(("baton.parent", "mlflow.parent"))}

    above = parent.require("tracking.json")["run_id"]
    names = {"baton.parent": parent.uri, "baton.parent_step": "40"}
    assert tags("fork", recipe) == {**names, "mlflow.parentRunId": above}
    elsewhere = load.with_overrides(recipe, ["tracking.experiment=another"])
    assert tags("far", elsewhere) == names
    assert tags("trial", recipe, trial={"sweep": "s", "id": "t000", "tracking": above[::-1]}) == {
        **names,
        "mlflow.parentRunId": above[::-1],
    }


def test_a_server_that_is_away_is_a_warning(tmp_path: Path) -> None:
    run = _run(tmp_path, "http://127.0.0.1:9")
    assert run.raw("tracking.json") is None
    with Tracker(run) as tracker:
        tracker.log({"loss": 1.0}, 1)


def test_a_server_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    run = _run(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    run.put("tracking.json", {"mlflow": "http://127.0.0.1:9", "run_id": "0"})
    started = time.monotonic()
    with Tracker(run) as tracker:
        for step in range(1000):
            tracker.log({"loss": 1.0}, step)
        assert time.monotonic() - started < 5
    assert time.monotonic() - started < 60


DELETED: dict[str, tuple[Callable[[Run], None], str]] = {
    "metrics": (lambda run: tracking_run.log_metrics(run, {"loss": 1.0}, 1), "stopped"),
    "tags": (lambda run: tracking_run.tag(run, {"a": "b"}), "has no tags of this run"),
    "the end": (
        lambda run: tracking_run.close(run, "FINISHED", {"a.txt": "a"}),
        "was not told that this run is finished",
    ),
    "a resumed run": (lambda run: tracking_run.start(run, run.recipe()), "does not know that this run resumes"),
}


def test_a_run_that_mlflow_has_no_more_is_told_on_the_screen_and_in_the_report(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("delete from runs")
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    for what, (tell, words) in DELETED.items():
        tell(run)
        told = [event for event in map(events.parse, capsys.readouterr().out.splitlines()) if event]
        assert any(words in event.text for event in told if isinstance(event, events.Warned)), what
        assert any(words in each.text for each in run.warnings()), what
    texts = [each.text for each in run.warnings()]
    DELETED["tags"][0](run)
    assert sorted(each.text for each in run.warnings()) == sorted(texts), "each is told once"


def test_an_experiment_that_is_deleted_is_told(tmp_path: Path) -> None:
    first = _run(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    database = sqlite3.connect(tmp_path / "mlflow.db")
    database.execute("update experiments set lifecycle_stage = 'deleted'")
    database.commit()
    run = Run(first.storage, "second")
    run.create(first.recipe())
    tracking_run.start(run, run.recipe())
    assert run.raw("tracking.json") is None
    assert "is off for this run" in run.warnings()[0].text


def _chunk(run: Run, steps: range) -> None:
    with Tracker(run, trains=True, params={"plan.steps": "6"}) as tracker:
        for step in steps:
            tracker.log({"loss": float(step)}, step)
        time.sleep(0.5)  # some samples of the machine


def _losses(path: Path) -> list[tuple[int, float]]:
    database = sqlite3.connect(path)
    return database.execute("select step, value from metrics where key = 'loss' order by timestamp, step").fetchall()


@pytest.mark.slow
def test_short_chunks_hold_back_and_the_next_that_opens_the_database_sends_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    path = tmp_path / "mlflow.db"
    run = _run(tmp_path, f"sqlite:///{path}")
    folder = tmp_path / "store" / "runs" / "r" / "unsent"
    _chunk(run, range(1, 4))
    lost = subprocess.run([sys.executable, "-c", LOST, run.uri], capture_output=True, text=True)
    assert lost.returncode == -signal.SIGKILL, lost.stderr
    with open(sorted(folder.iterdir())[-1], "a", encoding="utf-8") as file:
        file.write('{"metrics": {"lo')  # cut off
    _chunk(run, range(4, 7))  # restored at step 3
    assert len(list(folder.iterdir())) == 3
    assert _losses(path) == []
    tracking_run.log_metrics(run, {"final_after_loss": 1.0}, 6)
    assert _losses(path) == [(step, float(step)) for step in range(1, 7)]
    assert list(folder.iterdir()) == []
    query = "select step from metrics where key = 'system/cpu_utilization_percentage' order by timestamp"
    samples = [step for (step,) in sqlite3.connect(path).execute(query)]
    assert samples == list(range(len(samples)))
    assert len(samples) >= 2  # of both chunks
    _chunk(run, range(7, 8))
    tracking_run.close(run, "FAILED")
    assert _losses(path)[-1] == (7, 7.0)
    parameters = dict(sqlite3.connect(path).execute("select key, value from params").fetchall())
    assert parameters["plan.steps"] == "6"


LOST = """
import os, signal, sys
from baton.tracking.tracker import Tracker
from baton.runs.run import Run
tracker = Tracker(Run.open(sys.argv[1]), trains=True)
for step in (4, 5):
    tracker.log({"loss": float(step)}, step)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_chunk_that_stands_by_loses_nothing_to_the_one_that_sends(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    run = _run(tmp_path, f"sqlite:///{path}")
    _chunk(run, range(1, 3))
    with Tracker(run, trains=True) as waiting:
        tracking_run.log_metrics(run, {"written_bleu": 1.0}, 2)
        waiting.log({"loss": 3.0}, 3)
    assert _losses(path) == [(1, 1.0), (2, 2.0)]
    tracking_run.close(run, "FINISHED")
    assert _losses(path) == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.slow
def test_a_chunk_that_lasts_sends_what_it_held_back_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "HELD_S", 0.5)
    path = tmp_path / "mlflow.db"
    run = _run(tmp_path, f"sqlite:///{path}")
    with Tracker(run, trains=True) as tracker:
        for step in range(1, 5):
            tracker.log({"loss": float(step)}, step)
            time.sleep(0.3)
    assert _losses(path) == [(step, float(step)) for step in range(1, 5)]


def test_a_full_disk_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = messages.MetricBuffer(str(tmp_path))
    os.dup2(os.open("/dev/full", os.O_WRONLY), held._file.fileno())
    held.write({"metrics": {"loss": 1.0}, "step": 1})
    assert "metrics are not kept for MLflow: " in caplog.text
    held.write({"metrics": {"loss": 1.0}, "step": 2})
    held.close()


def test_the_process_beside_a_chunk_imports_next_to_nothing() -> None:
    code = f"import sys, {SENDER}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert SENDER in loaded
    assert not {"mlflow", "numpy", "pydantic", "sqlalchemy", "torch"} & set(loaded)


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_steps_that_a_chunk_trains_again_are_there_once(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    run = _run(tmp_path, f"sqlite:///{path}")
    for steps, value in (((1, 2, 3), 5.0), ((2, 3, 4, 5), 6.0)):  # killed after 3, its checkpoint that of 1
        with Tracker(run, trains=True) as tracker:
            for step in steps:
                tracker.log({"loss": value, **({"eval_loss": value} if step == 4 else {})}, step)
    for value in (1.0, 2.0):  # a stage that runs again may come to another figure
        tracking_run.log_metrics(run, {"final_after_loss": value}, 5)
    rows = sqlite3.connect(path).execute(
        "select key, step, value from metrics where key like '%loss' order by key, step, value"
    )
    assert rows.fetchall() == [
        ("eval_loss", 4, 6.0),
        *(("final_after_loss", 5, value) for value in (1.0, 2.0)),
        *(("loss", step, 5.0) for step in (1, 2, 3)),
        *(("loss", step, 6.0) for step in (4, 5)),
    ]
