"""Negative controls as a page: `python -m tests.exactness.controls_table docs/internals/controls.md` (`make docs`)."""

from __future__ import annotations

import string
import sys
from pathlib import Path

from baton.recipe.recipe import Recipe
from baton.runs.documents import PARTS
from tests.exactness import controls, matrix
from tests.exactness.matrix import Cell
from tests.exactness.matrix_table import all_cells, shown

INTRODUCTION = """\
# Negative controls

<!-- Written by `make docs` from tests/exactness/controls.py; edit that file instead. -->

A comparison that cannot fail proves nothing. Each cell of [the matrix](matrix.md) therefore has negative controls, one
for each part of the [state](../trust/exactness.md#the-state-digest). A chunk resumes in the middle of the run from a
copy of its checkpoint without that part (with half of each weight). Its result must differ outside that part:

- weights, without optimizer, scheduler, scaler, random state, position (with the log's running sums) or method state;
- optimizer or logged values, without weights;
- weights or decisions (saves, evaluations, end of the run), without callbacks;
- values logged after the resume, without the log.

● marks a part with such an effect. A letter marks an idle part; the reason is below the table, computed from the recipe
(`idle` in `tests/exactness/controls.py`). All idle parts are left out together, and everything else must stay equal,
byte for byte. A part that becomes idle, or ceases to be, fails the test.

"""


def markdown() -> str:
    """Returns the page."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    reasons: dict[tuple[str, str], str] = {}
    count = marks = 0
    for cell in all_cells():
        idle = controls.idle(_recipe(cell), cell.middle)
        for part, reason in idle.items():
            reasons.setdefault((part, reason), string.ascii_lowercase[len(reasons)])
        row = tuple(reasons[part, idle[part]] if part in idle else "●" for part in PARTS)
        rows.setdefault((shown(cell), row), []).append(cell.method)
        count, marks = count + 1, marks + row.count("●")
    lines = [f"| {feature} | {', '.join(methods)} | {' | '.join(row)} |" for (feature, row), methods in rows.items()]
    head = f"| feature | methods | {' | '.join(PARTS)} |\n|---|---|{':-:|' * len(PARTS)}\n"
    legend = [f"- {letter}, {part}: {reason}." for (part, reason), letter in reasons.items()]
    total = f"{count} cells of {len(PARTS)} parts: {marks} show, {count * len(PARTS) - marks} are idle."
    return INTRODUCTION + head + "\n".join([*lines, "", *legend, "", total, ""])


def _recipe(cell: Cell) -> Recipe:
    return matrix.recipe(cell, "store", "base", "rows.jsonl")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
