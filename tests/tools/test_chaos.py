"""A mean minute: kills in every stage, outages and full disks, and nothing is lost; what were lost would be seen."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.exactness import matrix
from tests.exactness.matrix import Cell
from tools.chaos import check, page, plan
from tools.chaos.machine import Machine
from tools.chaos.mean import Mean


@pytest.fixture
def mean(faulty_s3: Any, tmp_path: Path) -> Iterator[Mean]:
    """Twenty kills."""
    made = Mean(tmp_path, faulty_s3.store, faulty_s3.proxy, seed=1, kills=20, seconds=0, cells=plan.CELLS[:1])
    yield made
    made.machine.close()


@pytest.mark.slow
@pytest.mark.s3
def test_twenty_kills_in_all_stages_lose_nothing_and_leave_nothing(mean: Mean, tmp_path: Path, faulty_s3: Any) -> None:
    mean.run()
    assert mean.kills >= 20
    assert {stage for result in mean.results for stage in result.kills} == set(plan.KILLS)
    result = mean.results[-1]
    assert page.verdict(page.document(mean, "", 0.0)).startswith("exact: ")
    assert result.digest[:16] in page.render(page.document(mean, "", 0.0))
    _require_that_losses_are_seen(mean, Run(Storage(faulty_s3.store), result.run), tmp_path / f"{result.run}.rows")


def _require_that_losses_are_seen(mean: Mean, run: Run, notes: Path) -> None:
    """The negative control of each check."""
    cell, found = plan.CELLS[0], check.finished(run, notes)
    assert mean.problems(run, cell, found) == []
    parts = {**found.outcome["parts"], "optimizer": "0" * 64}
    for name, changed in (("losses", found.outcome["losses"][1:]), ("parts", parts), ("weights_sha256", "0" * 64)):
        other = dataclasses.replace(found, outcome={**found.outcome, name: changed})  # type: ignore[typeddict-item]
        assert any("the run differs" in problem for problem in mean.problems(run, cell, other))
    step = max(found.rows)
    (pid, rows), *_ = found.rows[step].items()
    for wrong in ({step: {pid: [*rows, *rows]}}, {step: {pid: rows[:-1], pid + 1: rows[1:]}}):
        problems = mean.problems(run, cell, dataclasses.replace(found, rows={**found.rows, **wrong}))
        assert any(f"step {step}" in problem for problem in problems), problems
    examples, figures = found.evaluated
    doubled = dataclasses.replace(found, evaluated=(examples + examples, figures))
    assert any("examples.jsonl differs" in problem for problem in mean.problems(run, cell, doubled))
    lost = dataclasses.replace(found, exported=dict(list(found.exported.items())[1:]))
    assert any("differs" in problem for problem in mean.problems(run, cell, lost))
    last = run.plan().num_steps
    assert check.checkpoints_left(run, {last - 2, last - 1}), "a newer one is gone"
    proof = run.path("proof/chunk-002.json")
    kept = run.storage.read(proof)
    run.storage.remove(proof)
    assert mean.problems(run, cell, found) == ["proof/chunk-002.json is there undisturbed"]
    run.storage.write(proof, kept)
    run.storage.write(run.path("export/0123456789ab/model.safetensors"), b"half")
    run.storage.write(
        run.path(f"checkpoints/step-{last - 1:08d}/0123456789ab/optimizer.pt"), b"half"
    )  # goes in an hour
    (mean.machine.memory / "baton-left").mkdir()
    (mean.machine.cache / ("0" * 64)).write_bytes(b"half")
    problems = [*mean.problems(run, cell, found), *mean.machine.left()]
    assert len(problems) == 3, problems
    store = CheckpointStore(run)
    checkpoint = store.read(last)
    assert checkpoint
    path = checkpoint.manifest.path(store.prefix(last), "trainer_state.json")
    state = json.loads(run.storage.read(path))
    state["log_history"] *= 2
    run.storage.write(path, json.dumps(state).encode())
    assert check.steps_logged_twice(run) == [f"step {number} was logged 2 times" for number in range(1, last + 1)]
    assert [problem for problem in check.damaged(run) if problem.startswith(f"step {last}: trainer_state.json")]


def test_what_a_stage_leaves_is_told_from_who_has_its_number_later(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    command = ["bash", "-c", "sleep 60 & echo $!"]
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert first.stdout
    left = int(first.stdout.readline())
    shared = Path(f"/dev/shm/baton-test-{first.pid}")
    try:
        first.wait()
        shared.touch()
        machine.ran[first.pid] = time.time()
        assert machine.left() == [str(shared), f"process {left}: sleep 60"]
        machine.ran[first.pid] -= 60
        assert machine.left() == []
    finally:
        os.kill(left, signal.SIGKILL)
        shared.unlink()
        machine.close()


@pytest.mark.parametrize("cell", plan.CELLS, ids=lambda cell: cell.name)
def test_its_recipes_are_recipes(cell: Cell, tmp_path: Path) -> None:
    assert matrix.recipe(cell, str(tmp_path), str(tmp_path), "rows.jsonl").training.method == cell.method


def test_the_plan_is_the_seeds() -> None:
    drawn = [plan.attempt(5, 1, "export", 0, number, kill=True) for number in range(200)]
    assert drawn == [plan.attempt(5, 1, "export", 0, number, kill=True) for number in range(200)]
    assert drawn != [plan.attempt(6, 1, "export", 0, number, kill=True) for number in range(200)]
    assert {each.moment for each in drawn} == {None, *plan.MOMENTS["export"]}
    assert {each.weather for each in drawn} == {"", *plan.WEATHER}
    assert {each.full for each in drawn} == {"", *plan.FULL}
