"""Rows that a chat template refuses, or leaves parts of out: counted over the segments, and held against the recipe."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe
from baton.components.tokenize.masks.talk import OPEN


@dataclass
class Refusals:
    """What came of the rows' rendering.

    Attributes:
        of: Rows of the split that were looked at; a pair that becomes two rows for `kto` is one.
        rows: Those that could not be rendered, or not so that what counts in the loss can be told.
        first: The first of them: file, line and reason.
        told: What the template leaves out of the others → how often.
    """

    of: int = 0
    rows: int = 0
    first: str = ""
    told: Counter[str] = field(default_factory=Counter)

    def add(self, file: str, line: int, reason: str) -> None:
        """Counts a row."""
        self.rows += 1
        self.first = self.first or f"{file}, line {line:,}: {reason}"

    def merge(self, others: dict[str, Any]) -> None:
        """Adds what `to_json` returned elsewhere, further on."""
        self.of += others.get("of", 0)
        self.rows += others["rows"]
        self.first = self.first or others["first"]
        self.told.update(others["told"])

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"of": self.of, "rows": self.rows, "first": self.first, "told": dict(sorted(self.told.items()))}

    def judge(self, recipe: Recipe) -> None:
        """Checks that not too many rows were refused.

        Raises:
            UserError: more than `data.max_rejected`.
        """
        limit, rows = recipe.data.max_rejected, self.of
        if self.rows > limit * rows:
            raise UserError(
                f"{self.rows:,} of {rows:,} conversations cannot be written by the chat template so that what counts "
                f"in the loss is known ({self.rows / rows:.1%}; data.max_rejected is {limit:.1%}). The first is in "
                f"{self.first}.",
                remedy="Mend the data (data.quality.turns: fix drops conversations whose turns do not fit), set "
                "model.chat_template or data.train_on, or raise data.max_rejected.",
            )

    @staticmethod
    def tell(left_out: dict[str, int]) -> None:
        """Says what the chat template leaves out of the rows that are kept."""
        if left_out:
            events.emit(events.LeftOut(text=in_words(left_out), counts=left_out))


def in_words(told: dict[str, int]) -> str:
    """Returns what the chat template leaves out, in words."""
    by_itself = [what for what in told if what == OPEN or what.startswith("columns ")]
    left = [f"{count:,} {what}" for what, count in told.items() if what not in by_itself]
    words = [f"{' and '.join(left)} that the chat template leaves out"] if left else []
    return "; ".join([*words, *(f"{told[what]:,} {what}" for what in by_itself)])
