"""Devices that share the trials of a rung: a trial ends on its bits whatever becomes of the pods that train it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from baton.runs.outcomes import TrialFailure, TrialJoin
from baton.runs.run import Sweep
from baton.sweep import steer
from tests.exactness import matrix_turns
from tests.exactness.test_turns import CHUNKS, alone, begin, state, swept

CELL = next(cell for cell in matrix_turns.cells() if cell.quick)


@pytest.mark.slow
def test_a_pod_that_loses_its_processes_fails_a_preempted_one_leaves_its_trials_to_the_spare_one(
    grid: Any, legs: Any
) -> None:
    recipe = swept(grid(CELL), "shares", {"seed": [7, 8]})
    runs = begin(recipe, "shares", legs)
    sweep, trials = Sweep(runs[0].storage, "shares"), "t000 t001"
    code, printed = legs.leg(legs.share, sweep.uri, trials, 1, signal.SIGKILL, 9, 2)
    assert code == 1, printed
    assert "processes of t000, t001 were lost one after the other" in printed
    assert not legs.steps(runs[0])
    code, printed = legs.leg(legs.share, sweep.uri, trials, 0, signal.SIGTERM, 1, CELL.middle)
    assert code == 1, printed
    assert "this machine is preempted" in printed
    code, printed = legs.leg(legs.share, sweep.uri, trials, 1, signal.SIGTERM, 1, CELL.middle)  # of the second trial
    assert code == 0, printed
    assert "left: 't000 t001'" in printed
    code, printed = legs.leg(legs.share, sweep.uri, trials, 0, signal.SIGTERM, 0, 0)
    assert code == 0, printed
    assert "left: ''" in printed
    for run, whole in zip(runs, alone(recipe, runs, "shares", legs), strict=True):
        assert state(run, legs) == state(whole, legs)
        assert run.read(TrialFailure) is None


@pytest.mark.slow
def test_a_fork_joins_one_device_of_several_and_trials_of_another_stay_there(grid: Any, legs: Any) -> None:
    recipe = swept(grid(CELL), "joins", {"seed": [7, 8]})
    first, second = begin(recipe, "joins", legs)
    code, printed = legs.leg(legs.turns, [first.uri, second.uri], 1, 1)
    assert code == 0, printed
    sweep = Sweep(first.storage, "joins")
    steer.fork(sweep, "t000", None, ["training.learning_rate=0.001"])
    sweep.ask("t000", "go", "promoted")
    sweep.ask("t001", "go", "promoted")
    joined = []
    for run, name in ((first, "t000"), (second, "t001"), (first, "t000")):
        code, printed = legs.leg(legs.turns, [run.uri], 1, CHUNKS, (), None, (1, name))
        assert code == 0, printed
        joined.append({trial for trial in ("t000", "t001", "f000") if f"turn trial={trial}" in printed})
    assert joined[:2] == [{"t000", "f000"}, {"t001"}]
    assert joined[2] <= {"t000", "f000"}
    assert sweep.read(TrialJoin, 1, "f000") == TrialJoin(device="t000")
    assert max(legs.steps(sweep.run(sweep.trial("f000")))) == max(legs.steps(first))
