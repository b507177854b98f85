"""The score of a trial whose process was killed between its commit and its score: what it would have been."""

from __future__ import annotations

from typing import Any

import pytest

from baton.checkpoint import seals
from baton.runs.outcomes import TrialInfo, TrialScore
from baton.runs.run import Run
from tests.exactness import matrix

CELLS = {
    f"{cell.method} {cell.feature}": cell
    for cell in matrix.cells()
    if cell.weights == "full" and "ddp" not in cell.feature and "fsdp" not in cell.feature
}
QUICK = ["dpo moving reference"]
SLOW = [
    "kto moving reference", "grpo moving reference", "rloo moving reference", "grpo three iterations",
    "distillation plain", "sft stateful callback", "sft plateau", "dpo early stopping", "orpo log windows",
]  # fmt: skip
"""Whatever of the state `Trainer` does not restore by itself."""


def _scores(run: Run, legs: Any, leave_out: tuple[str, ...] = ()) -> Any:
    """Runs the chunk, which is scored where it has no score, and takes the score away again, with the chunk's seal."""
    code, printed = legs.leg(legs.chunk, run.uri, 1, leave_out)
    assert code == 0, printed
    document = run.require(TrialScore.file_name(1))
    run.storage.remove(run.path(TrialScore.file_name(1)))
    for number in seals.numbers(run):
        if seals.read_seal(run, number, None).stage.startswith("train-chunk"):
            run.storage.remove(seals.path_of(run, number))
    return {name: value for name, value in document.items() if name not in ("at", "seconds")}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_score_taken_again_is_the_score(name: str, grid: Any, legs: Any) -> None:
    run = legs.prepare(grid(CELLS[name]), f"scored-{CELLS[name].name}")
    run.put(TrialInfo.NAME, {"sweep": "s", "id": "t000", "values": {}, "metric": "eval_loss"})
    first = _scores(run, legs)
    assert first["value"] is not None
    assert _scores(run, legs) == first
    if "moving reference" in name and not name.startswith(("grpo", "rloo")):
        # The same against the start's reference is another score.
        assert _scores(run, legs, ("method",)) != first
