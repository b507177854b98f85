"""Every part of the state matters in every cell of the matrix, or is idle there for a reason that holds."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from baton.runs.documents import PARTS
from tests.exactness import controls
from tests.exactness.matrix import Cell
from tests.exactness.matrix_table import all_cells

QUICK = ("sft-full-early-stopping", "grpo-full-three-iterations")
"""Between them no part is idle but the scaler."""
CELLS = [
    pytest.param(cell, id=cell.name, marks=[] if cell.name in QUICK else [pytest.mark.slow]) for cell in all_cells()
]


@pytest.mark.parametrize("cell", CELLS)
def test_a_part_that_is_left_out_leaves_a_trace_or_is_idle(cell: Cell, grid: Any, legs: Any) -> None:
    recipe = grid(cell)
    run = legs.prepare(recipe, f"{cell.name}-controls")
    legs.cut(run, (cell.middle, cell.steps))
    assert run.plan().rows == controls.PROMPTS.get(cell.method, run.plan().rows)
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0, printed
    idle = tuple(controls.idle(recipe, cell.middle))
    active = [part for part in PARTS if part not in idle]
    # An average over the steps since a later one has no meaning: with the position go the log's sums.
    variants = [(), idle, *(("position", "log") if part == "position" else (part,) for part in active)]
    whole, without_idle, *without = controls.ends(run, variants, legs, importlib.import_module("control_legs"))
    assert whole.differences(without_idle) <= set(idle), "what is idle changes nothing else"
    traces = {part: whole.traces(part, end) for part, end in zip(active, without, strict=True)}
    assert [part for part in active if not traces[part]] == []
