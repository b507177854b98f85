"""Scores with their held-out rows, by which a sweep's judge tells how sure a difference is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.recipe import load
from baton.runs.outcomes import TrialRows, TrialScore
from tests.exactness import matrix_turns
from tests.exactness.test_turns import alone, begin, state, swept


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_of_a_score_are_the_same_for_any_micro_batch_and_training_does_not_see_them(
    method: str, grid: Any, legs: Any
) -> None:
    cell = next(cell for cell in matrix_turns.cells() if cell.method == method and cell.weights == "full")
    document = swept(grid(cell), cell.name, {"training.micro_batch_size": [1, 2]}).model_dump(mode="json")
    document["sweep"]["halving"] = {"eta": 2, "sure": 0.9}
    recipe, name = load.validate(document, origin=cell.name), f"sure-{method}"
    runs = begin(recipe, name, legs)
    code, printed = legs.leg(legs.turns, [run.uri for run in runs], 1, 1)
    assert code == 0, printed
    rows = [run.need(TrialRows, 1) for run in runs]
    for run, own in zip(runs, rows, strict=True):
        score = run.need(TrialScore, 1)
        assert len(own.values) > 2
        assert np.average(own.values, weights=own.weights) == pytest.approx(score.value, rel=1e-6)
    assert rows[0].weights == rows[1].weights
    assert rows[0].values == pytest.approx(
        rows[1].values, rel=1e-3
    )  # row for row; without dropout micro-batches differ by rounding
    assert max(rows[0].values) > 1.01 * min(rows[0].values)  # so that another order would be seen
    whole = alone(recipe, runs, name, legs)
    code, printed = legs.leg(legs.turns, [run.uri for run in runs], 2, 3)
    assert code == 0, printed
    for run, other in zip(runs, whole, strict=True):
        assert state(run, legs) == state(other, legs)
