"""Every cell of the matrix ends on the bits of one run, whatever its chunks' ends; `test_controls.py` shows that it
would not without its state."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness import matrix
from tests.exactness.matrix import Cell

CELLS = [pytest.param(cell, id=cell.name, marks=[] if cell.quick else [pytest.mark.slow]) for cell in matrix.cells()]


@pytest.mark.parametrize("cell", CELLS)
def test_chunks_end_on_the_bits_of_one_run(cell: Cell, grid: Any, legs: Any) -> None:
    recipe = grid(cell)
    whole, parts = legs.prepare(recipe, f"{cell.name}-whole"), legs.prepare(recipe, f"{cell.name}-parts")
    legs.train(whole)
    end = max(legs.steps(whole))
    targets = matrix.targets(cell, end)
    legs.cut(parts, targets)
    legs.train(parts)
    assert legs.losses(parts, end) == legs.losses(whole, end)
    assert legs.final(parts, end).meta.state == legs.final(whole, end).meta.state
    assert set(legs.final(parts, end).meta.restored.checked.values()) <= {"match", "absent"}
