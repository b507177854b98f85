"""Documents of the steps that a run's guard has found, one each: all who come after skip them."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from baton.components.shared.core.document import NamedDocument
from baton.components.shared.runs.documents.rows import Place

FOLDER = "skips"
SHOWN = 4
"""Rows that a line names."""


class Skip(NamedDocument):
    """A step that is skipped.

    It is written once, by whoever finds the step first, before the step is trained again: there is nothing to replace.
    """

    NAME: ClassVar[str] = FOLDER + "/step-{:08d}.json"

    step: int
    chunk: int
    """The chunk in which it was found."""
    reason: str
    """What was looked at: `nan` for a loss or norm that is not finite, else `loss` or `grad_norm`."""
    message: str
    """What it came to, in words."""
    loss: float | None = None
    """None where it was not finite, as the next two."""
    grad_norm: float | None = None
    """Norm of the gradients before clipping."""
    median: float | None = None
    """Of what was looked at, over the steps before."""
    rows: list[Place] = Field(default_factory=list)
    """Where its rows come from, the first of them; of packed ones all that are in its sequences."""
    num_rows: int = 0
    """How many there are; 0 where they could not be found."""
    created: str = ""

    @property
    def rows_in_words(self) -> str:
        """Its rows by file and line, the first of them; empty where they could not be found."""
        by_file: dict[str, list[str]] = {}
        for row in self.rows[:SHOWN]:
            by_file.setdefault(row.file, []).append(f"{row.line:,}")
        shown = "; ".join(f"{file} line {', '.join(lines)}" for file, lines in by_file.items())
        rest = self.num_rows - min(len(self.rows), SHOWN)
        return f"{shown} and {rest:,} more" if rest > 0 else shown
