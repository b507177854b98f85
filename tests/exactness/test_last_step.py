"""The last step of a pass over the rows, where it has fewer of them, in a chunk that begins within that pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness import matrix
from tests.exactness.matrix import Cell


@pytest.mark.parametrize("method", ["orpo", pytest.param("cpo", marks=pytest.mark.slow)])
def test_its_figures_are_those_of_one_run(method: str, grid: Any, legs: Any) -> None:
    changes = {"data": {"max_samples": 17}, **matrix.training(micro_batch_size=2)}
    cell = Cell(method, "full", "few rows left", changes, steps=6)
    recipe = grid(cell)
    whole, parts = legs.prepare(recipe, f"{cell.name}-whole"), legs.prepare(recipe, f"{cell.name}-parts")
    assert whole.plan().rows == 15, "step 4 has a micro-batch of two rows and one of one"
    legs.train(whole)
    legs.cut(parts, (2, cell.steps))
    legs.train(parts)
    assert legs.final(parts).meta.restored.step == 2
    assert legs.history(parts)[3] == legs.history(whole)[3]
    assert legs.final(parts).meta.state == legs.final(whole).meta.state
