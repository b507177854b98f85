"""Cells of the matrix for runs that a budget ends, against runs that were told their length."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from tests.exactness import matrix
from tests.exactness.matrix import Cell, training

STEPS = 19
DECAY = {"lr_scheduler": "warmup_stable_decay", "lr_scheduler_options": {"num_decay_steps": 4}, "warmup_steps": 2}
TESTS = {
    "decided early": "test_a_run_that_its_budget_ends_equals_one_of_that_length[{}-early]",
    "decided late": "test_a_run_that_its_budget_ends_equals_one_of_that_length[{}-late]",
    "extended": "test_every_method_goes_on_with_a_larger_budget[{}]",
    "cut": "test_every_method_ends_earlier_with_a_smaller_budget[{}]",
}


def limited(cell: Cell) -> Cell:
    """Returns a cell whose schedule ends in a decay."""
    changes = training(**DECAY)
    matrix.merge(changes, copy.deepcopy(cell.changes))
    return Cell(cell.method, cell.weights, f"budget {cell.feature}", changes, steps=STEPS)


ALONE = [limited(Cell(method, "full", "alone")) for method in matrix.METHODS]


def tests() -> Iterator[tuple[str, Cell]]:
    """Yields the tests of each method, with a cell named by what they do."""
    for way, test in TESTS.items():
        for cell in ALONE:
            yield f"tests/exactness/test_budget.py::{test.format(cell.name)}", replace(cell, feature=f"budget, {way}")
