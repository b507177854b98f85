"""A page that lives is the static page, read with few requests."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.runs.documents import Progress
from baton.runs.run import Run, iso, now
from baton.store.storage import Storage
from baton.sweep import page as sweep_page
from baton.sweep import view as sweep_view
from baton.tracking.client import connect
from baton.watch import listed, views
from baton.watch.listed import ListedStorage
from baton.watch.tail import Tail
from baton.watch.views import RunView, SweepView
from tests.sweep.swept import STEPS, Swept

ONE = {"training.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}
RATE = "training.learning_rate"


RECIPE = {"name": "swept", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}, "training": {"epochs": 1}}


SOON_S = 0.3


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object is read for good sooner."""
    monkeypatch.setattr(listed, "SETTLED_S", SOON_S)


def _static(made: Swept) -> str:
    return sweep_page.render(sweep_view.gather(made.sweep, families=False), live=True)


def _run(made: Swept, trial: str) -> Run:
    return Run(made.storage, f"sweep-{trial}")


CHANGES: dict[str, Callable[[Swept], object]] = {
    "nothing": lambda made: None,
    "a chunk": lambda made: made.train(made.trials[0], 2),
    "a request": lambda made: made.sweep.ask("t001", "stop", "x"),
    "another request of the same size": lambda made: made.sweep.ask("t000", "stop", "ab"),
    "a failure": lambda made: _run(made, "t003").put("failure.json", {"chunk": 2, "message": "lost"}),
    "a fork": lambda made: made.fork("t000", "f000", STEPS, {RATE: [0.1, 0.2]}),
    "a rung": lambda made: made.sweep.write(made.sweep.rungs()[0].model_copy(update={"rung": 2}), 2),
    "a run that is gone": lambda made: [made.storage.remove(_run(made, "t002").path(x)) for x in _found(made, "t002")],
}


def _found(made: Swept, trial: str) -> list[str]:
    return list(made.storage.find(_run(made, trial).path()))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_a_change_it_is_the_page_of_the_store(change: Callable[[Swept], object], tmp_path: Path) -> None:
    made = Swept(tmp_path, 4, ONE, [(1, 2), (2, 1), (3, 1)])
    made.go(1)
    made.sweep.ask("t000", "go", "abcd")
    view = SweepView(made.sweep)
    assert view.render() == _static(made)
    change(made)
    assert view.render() == _static(made)
    assert view.render() == _static(made)


@pytest.mark.s3
def test_a_round_is_one_listing_of_each_run_and_a_read_of_each_change(
    tmp_path: Path, s3_store: str, soon: None
) -> None:
    made = Swept(tmp_path, 3, ONE, [(1, 2), (2, 1)], store=s3_store)
    made.go(1)
    view = SweepView(made.sweep)
    view.render()
    time.sleep(SOON_S + 0.1)

    def requests() -> int:
        before = view.storage.requests
        view.render()
        return view.storage.requests - before

    requests()  # reads all once more: their second is over now
    assert requests() == 1 + 3
    _run(made, "t000").write(Progress(step=STEPS + 1, chunk=2, seconds_per_step=1.0, at=now()))
    assert requests() == 1 + 3 + 1
    time.sleep(SOON_S + 0.1)
    assert requests() == 1 + 3 + 1
    assert requests() == 1 + 3


@pytest.mark.parametrize(("most", "local"), [(views.MOST_LISTED_HERE, True), (views.MOST_LISTED, False)])
def test_of_many_trials_those_that_train_come_first(most: int, local: bool, tmp_path: Path) -> None:
    made = Swept(tmp_path, 200, ONE, [(1, 100), (2, 1)])
    made.go(0)
    view = SweepView(made.sweep)
    view.storage.is_local = local
    view.render()
    run = _run(made, "t050")
    run.put("plan.json", {"rows": 1, "steps_per_epoch": 1, "num_steps": 80, "targets": [40, 80]})
    run.write(Progress(step=3, chunk=1, seconds_per_step=1.0, at=now()))
    for _ in range(200 // most + 1):  # found within a turn of all
        if 'class="now"' in (page := view.render()):
            break
    assert 'class="now"' in page
    before = view.storage.requests
    view.render()
    assert view.storage.requests - before <= 1 + most + 3
    # The next one in turn is seen at once.
    _run(made, "t051").write(Progress(step=1, chunk=1, seconds_per_step=1.0, at=now()))
    view.render()
    page = view.render()
    assert page.count('class="now"') == 2


def test_a_run_takes_one_listing_and_a_trial_one_more_for_its_sweep(tmp_path: Path, soon: None) -> None:
    made = Swept(tmp_path, 1, ONE, [(1, 1), (2, 1)])
    made.go(1)
    run = _run(made, "t000")
    run.put("recipe.json", {"recipe": RECIPE, "created": "2026-11-21T10:00:00.000Z", "name": run.name})
    view = RunView(run)
    view.render()
    time.sleep(SOON_S + 0.1)
    view.render()
    before = view.storage.requests
    assert f"step {STEPS:,} of {2 * STEPS:,}, chunk 2 of 2" in view.render()
    assert view.storage.requests - before == 2
    run.storage.remove(run.path("trial.json"))
    view.render()
    before = view.storage.requests
    view.render()
    assert view.storage.requests - before == 1


def test_where_nothing_was_written_for_minutes_the_page_tells(tmp_path: Path) -> None:
    made = Swept(tmp_path, 1, ONE, [(1, 1), (2, 1)])
    made.go(1)
    view = SweepView(made.sweep)
    assert "No chunk trains" not in view.render()
    for path in made.storage.find(""):
        os.utime(tmp_path / "store" / path, (time.time() - 200, time.time() - 200))
    assert "No chunk trains just now; the store has not changed for 3 min 00 s." in view.render()


STALE = {
    "none": (None, False),
    "beyond the checkpoint": ((STEPS + 1, 0.0), True),
    "at the checkpoint": ((STEPS, 0.0), False),
    "long ago": ((STEPS + 1, 60.0), False),
    "long ago, by long steps": ((STEPS + 1, 60.0), True),
}


@pytest.mark.parametrize(("noted", "trains"), STALE.values(), ids=STALE)
def test_a_note_tells_whether_a_chunk_trains(
    noted: tuple[int, float] | None, trains: bool, request: pytest.FixtureRequest
) -> None:
    pace = 25.0 if "long steps" in request.node.name else 0.1
    progress = noted and Progress(step=noted[0], seconds_per_step=pace, at=iso(time.time() - noted[1]))
    assert views.trains(progress or None, STEPS) is trains


def test_an_object_written_twice_in_a_second_is_read_twice(tmp_path: Path) -> None:
    """A cloud's clock may tell whole seconds: size and time are then those of the first write."""
    written = Storage(str(tmp_path))
    written.write("runs/a/x.json", b"1")
    listed = ListedStorage(str(tmp_path))
    assert listed.read("runs/a/x.json") == b"1"
    stamp = (tmp_path / "runs/a/x.json").stat().st_mtime
    written.write("runs/a/x.json", b"2")
    os.utime(tmp_path / "runs/a/x.json", (stamp, stamp))
    listed.begin_round()
    assert listed.read("runs/a/x.json") == b"2"


def test_listings_are_those_of_the_store(tmp_path: Path) -> None:
    plain, listed = Storage(str(tmp_path)), ListedStorage(str(tmp_path))
    for path in (
        "runs/a/x.json",
        "runs/a/b/y.json",
        "runs/a/b/z.json",
        "runs/ab/q.json",
        "data/d/e",
        "sweeps/s/sweep.json",
    ):
        plain.write(path, path.encode())
    for path in ("runs/a", "runs/a/b", "runs/a/b/y.json", "runs/ab", "runs/none", "runs", "data/d", "", "sweeps/s"):
        assert listed.list(path) == plain.list(path), path
        assert listed.size(path) == plain.size(path), path
        assert listed.find(path) == plain.find(path), path
    assert listed.read("runs/a/b/y.json") == b"runs/a/b/y.json"
    for path in ("runs/a/none", "runs/none/none"):
        with pytest.raises(FileNotFoundError):
            listed.read(path)


def test_a_note_of_mlflow_that_cannot_be_asked_is_on_the_page(tmp_path: Path) -> None:
    made = Swept(tmp_path, 2, ONE, [(1, 1), (2, 1)])
    made.go(1)
    _run(made, "t000").write(Progress(step=STEPS + 1, chunk=2, seconds_per_step=1.0, at=now()))
    view = SweepView(made.sweep)
    assert "Not tracked in MLflow: curves grow at each checkpoint." in view.render()
    _run(made, "t000").put("tracking.json", {"mlflow": f"sqlite:///{tmp_path}/none.db", "run_id": "0"})
    assert "none.db is not on this machine: curves grow at each checkpoint." in view.render()
    assert not (tmp_path / "none.db").exists()
    lines = json.dumps({"metrics": {"loss": 2.5}, "step": STEPS + 1}) + "\n"
    made.storage.write("runs/sweep-t000/unsent/1.jsonl", lines.encode())
    page = view.render()
    assert "2.5" in page


@pytest.mark.slow
def test_losses_that_were_sent_come_from_mlflow(tmp_path: Path) -> None:
    made = Swept(tmp_path, 1, ONE, [(1, 1), (2, 1)])
    made.go(1)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = connect(uri)
    tracked = client.create_run(client.create_experiment("e")).info.run_id
    for step in range(STEPS - 1, STEPS + 4):
        client.log_metric(tracked, "loss", step / 8, step=step)
    _run(made, "t000").put("tracking.json", {"mlflow": uri, "run_id": tracked})
    tail, ends = Tail(), time.monotonic() + 60
    while not (losses := tail.read(_run(made, "t000"), STEPS)):
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert losses == [{"step": step, "loss": step / 8} for step in range(STEPS + 1, STEPS + 4)]
    assert tail.trouble == ""


def test_a_server_that_does_not_answer_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Swept(tmp_path, 1, ONE, [(1, 1), (2, 1)])
    made.go(1)
    for name, value in (("TIMEOUT", "1"), ("MAX_RETRIES", "0")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://name:word@127.0.0.1:{silent.getsockname()[1]}"
        _run(made, "t000").put("tracking.json", {"mlflow": uri, "run_id": "0"})
        tail, began = Tail(), time.monotonic()
        assert tail.read(_run(made, "t000"), STEPS) == []
        assert time.monotonic() - began < 0.5
        while not tail.trouble:
            assert time.monotonic() - began < 60
            time.sleep(0.05)
    assert tail.trouble == f"MLflow at {uri.replace('name:word@', '')} does not answer: curves grow at each checkpoint."
