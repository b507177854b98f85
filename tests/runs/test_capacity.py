"""Spot or on demand: the moments at which a run with a deadline changes its capacity."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.runs.capacity import MACHINE_S, ON_DEMAND, SPOT, Course, next_nodes
from baton.runs.documents import NodeChoice, Progress
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store.storage import Storage

HOUR = 3600.0
COURSE = Course(work=10 * HOUR, time=15 * HOUR, change=HOUR / 4)


@pytest.mark.parametrize(
    ("done_h", "until_h"),
    [
        (0, 0.0),  # behind from the start
        (2, 3.0),  # two tenths of the work, two tenths of the time
        (6, 9.0),
        (9, 13.5),  # both bounds meet
        (9.5, 14.0),  # later, two changes would not leave time for the rest
        (10, 14.5),
    ],
)
def test_a_run_waits_for_spot_while_it_is_not_behind_and_not_late(done_h: float, until_h: float) -> None:
    assert COURSE.spot_until(done_h * HOUR) == until_h * HOUR


@pytest.mark.parametrize(
    ("machine", "until_h"),
    [
        (SPOT, 10.75),  # 4 h of work and a change before 15 h: behind uniform progress for long
        (ON_DEMAND, 8.5),  # two changes ahead of uniform progress
        (None, 9.0),
    ],
)
def test_a_machine_that_is_there_is_kept_longer(machine: str | None, until_h: float) -> None:
    until = until_h * HOUR
    assert COURSE.after_chunk(machine, 6 * HOUR, until) == SPOT
    assert COURSE.after_chunk(machine, 6 * HOUR, until + 1) == ON_DEMAND


def _run(tmp_path: Path, left_h: float = 10.0, **settings: Any) -> Run:
    ends = datetime.datetime.fromtimestamp(time.time() + left_h * HOUR, datetime.UTC)
    document = {
        "name": "t",
        "model": {"base": "m"},
        "data": {"source": "r.jsonl"},
        "training": {"method": "sft", "max_steps": 1000, "batch_size": 8},
        "chunks": {"count": 10, **settings},
        "budget": {"by": ends.isoformat(), "reserve": "1h"},
        "resources": {"capacity": "spot-first", "node_selector": {"zone": "a"}},
    }
    run = Run(Storage(str(tmp_path)), "t")
    run.create(load.validate(document, origin="r.yaml"))
    return run


PLAN = Plan(rows=8000, steps_per_epoch=1000, num_steps=1000, targets=tuple(range(100, 1001, 100)))
NODES = {kind: {"zone": "a", "karpenter.sh/capacity-type": kind} for kind in (SPOT, ON_DEMAND)}


@pytest.mark.parametrize(
    ("settings", "unsaved"),
    [
        ({}, 100 * 20),  # a chunk
        ({"checkpoint_every": 30}, 30 * 20),
        ({"checkpoint_every": "5m"}, 300),
        ({"checkpoint_every": "continuous"}, 20),
        ({"checkpoints_per_epoch": 4}, 250 * 20),
    ],
)
def test_a_course_counts_what_a_lost_machine_costs(tmp_path: Path, settings: dict[str, Any], unsaved: float) -> None:
    run = _run(tmp_path, **settings)
    note = Progress(step=100, seconds_per_step=20.0, started=time.time(), start_seconds=60.0)
    course = Course.of(run.recipe(), PLAN, note)
    assert course is not None
    assert course.work == 20_000
    assert course.time == pytest.approx(9 * HOUR, abs=60)
    assert course.change == MACHINE_S + 60 + unsaved / 2


@pytest.mark.parametrize(
    ("kind", "began_h", "left_h", "is_lost", "following"),
    [
        # Of 1,000 steps of 20 s 700 are left, 3.9 h; the reserve takes an hour of the time.
        (SPOT, 0.5, 10.0, False, SPOT),
        (SPOT, 6.0, 4.9, False, ON_DEMAND),
        (SPOT, 4.2, 10.0, False, SPOT),
        (SPOT, 4.2, 10.0, True, ON_DEMAND),
        (SPOT, 0.5, 10.0, True, SPOT),
        (ON_DEMAND, 0.5, 10.0, False, SPOT),
        (ON_DEMAND, 4.2, 10.0, False, ON_DEMAND),
    ],
)
def test_the_next_chunk_gets_the_nodes_of_its_capacity(
    tmp_path: Path, kind: str, began_h: float, left_h: float, is_lost: bool, following: str
) -> None:
    run = _run(tmp_path, left_h, checkpoint_every=10)
    run.write(Progress(step=290, seconds_per_step=20.0, started=time.time() - began_h * HOUR, start_seconds=60.0))
    assert next_nodes(run, PLAN, 3, 300, NODES[kind], is_lost=is_lost) == NODES[following]
    assert run.read(NodeChoice) == NodeChoice(chunk=4, nodes=NODES[following])


def test_before_a_step_was_timed_the_nodes_stay(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert next_nodes(run, PLAN, 1, 0, NODES[ON_DEMAND], is_lost=False) == NODES[ON_DEMAND]
