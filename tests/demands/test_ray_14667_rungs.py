"""A resumed search has forgotten its rungs and trains trials that it would have pruned.

Issue: https://github.com/ray-project/ray/issues/14667
Upstream: fixture, as the thread was not available; similar reports are ray-project/ray#30838 and sisinflab/warprec#126.
    ASHA keeps scores per rung in memory, and a new process has none.
Baton: verdicts and scores are documents in the store. Rungs judged by separate processes have the verdicts of one
    process, and no verdict is made twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from baton.runs.outcomes import TrialScore
from baton.runs.run import Sweep
from baton.sweep.trials import rank_trials
from tests.demands import chunks
from tests.sweep.swept import in_rungs

LOSSES = {1: {"t0": 4.0, "t1": 2.0, "t2": 1.0, "t3": 3.0}, 2: {"t1": 0.5, "t2": 0.9}, 4: {"t1": 0.25}}
"""By chunk."""


class Asha:
    """One rung of asynchronous successive halving: the better half goes on."""

    def __init__(self) -> None:
        self.recorded: dict[str, float] = {}

    def goes_on(self, trial: str, loss: float) -> bool:
        cutoff = np.percentile(list(self.recorded.values()), 50) if self.recorded else np.inf
        self.recorded[trial] = loss
        return bool(loss <= cutoff)


def test_upstream_compares_with_nobody_after_a_restart() -> None:
    scheduler = Asha()
    assert [scheduler.goes_on(trial, loss) for trial, loss in (("t2", 1.0), ("t1", 2.0))] == [True, False]
    assert not scheduler.goes_on("t0", 4.0)
    assert Asha().goes_on("t0", 4.0), "the same trial, in the process that resumes"


def made(folder: Path) -> Sweep:
    """A sweep of four trials in four chunks, all scores there."""
    sweep = in_rungs(folder)
    for chunk, losses in LOSSES.items():
        for trial, value in losses.items():
            score(sweep, chunk, trial, value)
    return sweep


def score(sweep: Sweep, chunk: int, trial: str, value: float) -> None:
    """Leaves a trial's score after a chunk."""
    found = {"chunk": chunk, "step": 2 * chunk, "value": value, "metrics": {}, "seconds": 1.0, "at": "now"}
    sweep.run(sweep.trial(trial)).put(TrialScore.file_name(chunk), found)


def test_baton_judges_by_what_is_in_the_store(tmp_path: Path, legs: Any) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    for number in (1, 2, 3):
        rank_trials(one, number)
        code, printed = legs.leg(chunks.judge_rung, str(tmp_path / "other"), "s", number)
        assert code == 0, printed
    kept = [rung.kept for rung in one.rungs()]
    assert kept == [["t2", "t1"], ["t1"], ["t1"]]
    assert [rung.kept for rung in other.rungs()] == kept
    assert [{x.id for x in rung.stopped} for rung in other.rungs()] == [{"t0", "t3"}, {"t2"}, set()]
    before = other.rung(1)
    score(other, 1, "t0", 0.0)
    assert legs.leg(chunks.judge_rung, str(tmp_path / "other"), "s", 1)[0] == 0
    assert other.rung(1) == before
