"""Measures rows in tokens, cuts or drops those that do not fit, and holds the counts against the recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.core.labels import IGNORED
from baton.components.shared.recipe import Recipe
from baton.components.tokenize.encoding import Row, id_columns

REQUIRED = ("train", "eval")


@dataclass
class Lengths:
    """Lengths of rows before anything is cut.

    Attributes:
        limit: `data.max_length`.
        rows: How many there are.
        total: Tokens of all.
        longest: Tokens of the longest.
        over: Rows longer than the limit.
        histogram: Upper bound of a class of lengths → its rows.
    """

    limit: int
    rows: int = 0
    total: int = 0
    longest: int = 0
    over: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, length: int) -> None:
        """Counts a row."""
        self.rows += 1
        self.total += length
        self.longest = max(self.longest, length)
        self.over += length > self.limit
        self.histogram[upper_bound(length)] += 1

    def merge(self, others: dict[str, Any]) -> None:
        """Adds what `to_json` returned elsewhere."""
        self.rows += others["rows"]
        self.total += others["total"]
        self.longest = max(self.longest, others["longest"])
        self.over += others["over"]
        self.histogram.update(dict(others["histogram"]))

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; the histogram as `[upper bound, rows]`, ascending, without empty classes."""
        return {
            "rows": self.rows,
            "total": self.total,
            "mean": self.total / self.rows if self.rows else 0.0,
            "longest": self.longest,
            "over": self.over,
            "histogram": [[bound, self.histogram[bound]] for bound in sorted(self.histogram)],
        }


class Fitting:
    """Cuts rows to `data.max_length` or leaves them out, and counts both.

    Rows of text are cut here. Of pairs, the trainers cut the answers; a score needs both answers whole. What is packed
    by joining rows is neither cut nor left out.

    Args:
        recipe: The recipe.

    Attributes:
        lengths: Of all rows.
        truncated: Rows that are cut, or too long to be used.
        dropped: Rows that are left out.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.limit = recipe.data.max_length
        self.lengths = Lengths(self.limit)
        self.truncated = self.dropped = 0
        self._joined = recipe.data.packing is True
        self._drops_long = recipe.data.quality.truncation == "fix"
        self._scores = recipe.training.spec.scores

    def fit(self, row: Row) -> Row | str:
        """Returns what is left of a row, or why it cannot be used."""
        length = length_of(row)
        self.lengths.add(length)
        if self._joined:
            return row
        if length > self.limit:
            if self._drops_long:
                return self._drop(f"{length} tokens, data.max_length is {self.limit}")
            self.truncated += 1
        if "labels" in row:
            row = {**row, "input_ids": row["input_ids"][: self.limit], "labels": row["labels"][: self.limit]}
            learned = len(row["labels"][1:]) > row["labels"][1:].count(IGNORED)
            return row if learned else self._drop(f"nothing to learn within data.max_length {self.limit}")
        if self._scores or "length" in row:
            return row if length <= self.limit else self._drop(f"{length} tokens, data.max_length is {self.limit}")
        if len(row["prompt_ids"]) < self.limit:
            return row
        return self._drop(f"the prompt alone has {len(row['prompt_ids'])} tokens, data.max_length is {self.limit}")

    def _drop(self, reason: str) -> str:
        self.dropped += 1
        return reason


def length_of(row: Row) -> int:
    """Returns a row's tokens: of a prompt with several answers, with the longest one."""
    if "length" in row:
        return int(row["length"])
    head = len(row["prompt_ids"]) if "prompt_ids" in row else 0
    return head + max(len(row[name]) for name in id_columns(row) if name != "prompt_ids")


def upper_bound(length: int) -> int:
    """Returns the end of a length's class: the powers of two and the middles between them, such as 64, 96, 128."""
    power = 1 << max(length - 1, 0).bit_length()
    middle = power * 3 // 4
    return middle if power >= 4 and length <= middle else power


def require_some(recipe: Recipe, counts: Mapping[str, int]) -> None:
    """Checks that the sides a run needs have sequences.

    Raises:
        UserError: one has none.
    """
    for side in REQUIRED:
        if counts[side] == 0:
            raise UserError(
                f"no {side} sequence is left after tokenizing with data.max_length {recipe.data.max_length}.",
                remedy="Raise max_length so that completions are reached, or give more text.",
            )


def judge(recipe: Recipe, lengths: dict[str, Any]) -> None:
    """Says what `data.quality.truncation` asks for.

    Raises:
        UserError: it is `fail`, and more rows than `truncated_share` are too long.
    """
    quality, data = recipe.data.quality, recipe.data
    over, rows = lengths["over"], lengths["rows"]
    if quality.truncation == "off" or data.packing is True or over <= quality.truncated_share * rows:
        return
    fixed = quality.truncation == "fix"
    text = (
        f"{over:,} of {rows:,} rows ({over / rows:.1%}) are longer than data.max_length {data.max_length:,}"
        f"{' and left out' if fixed else ''}; the longest has {lengths['longest']:,} tokens"
    )
    if quality.truncation == "fail":
        raise UserError(
            f"data.quality.truncation: {text}; more than {quality.truncated_share:.1%} may not be.",
            remedy="Raise data.max_length, set data.quality.truncation to fix to leave them out, or to warn.",
        )
    events.emit(events.Truncation(text=text, over=over, rows=rows, longest=lengths["longest"], fixed=fixed))
