"""A search that is resumed has forgotten its rungs, and trials that it would have stopped are trained on.

Issue: https://github.com/ray-project/ray/issues/14667
Upstream: fixture, as this thread could not be had; reports of the same are ray-project/ray#30838 and
    sisinflab/warprec#126. The mechanism is ASHA's: scores per rung in memory, of which a new process has none.
Baton: a rung's verdict and the trials' scores are documents in the store: each rung judged by a process of its own has
    the verdicts of one process, and a verdict that stands is not made again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from baton.components.shared.recipe import recipe_file
from baton.components.shared.runs.documents.sweeps import Score, SweepHead, TrialNote
from baton.components.shared.store.storage import Storage
from baton.components.shared.sweeps.sweep import Sweep
from baton.components.sweep.judge import judge
from tests.demands import chunks

RATES = [1e-4, 1e-3, 1e-2, 1e-1]
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
    recipe = recipe_file.validate(
        {
            "name": "swept",
            "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"train": {"vocab_size": 300}}},
            "data": {"source": "rows.jsonl"},
            "training": {"max_steps": 8, "batch_size": 8},
            "chunks": {"count": 4},
            "tracking": {"mlflow": None},
            "sweep": {"method": "grid", "parameters": {"training.learning_rate": RATES}, "halving": {"eta": 2}},
        },
        origin="test",
    )
    sweep = Sweep(Storage(str(folder)), "s")
    trials = [
        {"id": f"t{at}", "run": f"s-t{at}", "bracket": 1, "values": {"training.learning_rate": rate}, "parent": None}
        for at, rate in enumerate(RATES)
    ]
    rungs = [{"rung": at, "bracket": 1, "chunk": chunk, "keep": 1} for at, chunk in enumerate((1, 2, 4), 1)]
    head = {"name": "s", "created": "now", "recipe": recipe.model_dump(mode="json"), "metric": "eval_loss"}
    sweep.create(SweepHead.model_validate({**head, "mode": "min", "rungs": rungs, "trials": trials}))
    for trial in sweep.trials():
        sweep.run(trial).put(TrialNote.NAME, {"sweep": "s", "id": trial.id})
        sweep.run(trial).put("plan.json", {"rows": 1, "steps_per_epoch": 1, "num_steps": 8, "targets": [2, 4, 6, 8]})
    for chunk, losses in LOSSES.items():
        for trial, value in losses.items():
            score(sweep, chunk, trial, value)
    return sweep


def score(sweep: Sweep, chunk: int, trial: str, value: float) -> None:
    """Leaves a trial's score after a chunk."""
    found = {"chunk": chunk, "step": 2 * chunk, "value": value, "metrics": {}, "seconds": 1.0, "at": "now"}
    sweep.run(sweep.trial(trial)).put(Score.file_name(chunk), found)


def test_baton_judges_by_what_is_in_the_store(tmp_path: Path, legs: Any) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    for number in (1, 2, 3):
        judge(one, number)
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
