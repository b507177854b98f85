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
# Every part of the state matters

<!-- Written by `make docs` from tests/exactness/controls.py; edit that file instead. -->

A comparison that cannot fail proves nothing. So each cell of [the matrix](matrix.md) has negative controls, one for
each part of the [state](../trust/exactness.md#the-state-digest): a chunk resumes in the middle of the run from a copy
of its checkpoint without that part (with half of each weight). Its result must differ outside of that part from the
chunk that restores everything:

- weights where optimizer, scheduler, scaler, random state, position (with the log's running sums, which are of later
  steps) or the method's state is left out;
- optimizer or logged values where the weights are;
- weights or decisions (what is saved and evaluated, where the run ends) where callbacks' state is;
- values logged after the resume where the log is: its running sums and all that was logged before.

● is a part that shows in that way. A letter is a part that is idle in that cell, for the reason below the table; the
reason is computed from the recipe (`idle` in `tests/exactness/controls.py`), and it must hold: all idle parts are left
out together, and all else must be the same, byte for byte. So a part that turns idle fails the test, and so does one
that ceases to be.

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
