"""Rows that do not fit: cut or dropped by length, refused by the template, counted against the recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton import events
from baton.data.encoding import UNENDED, Row, id_columns
from baton.errors import RowError, UserError
from baton.models.train_rows import IGNORED
from baton.recipe.recipe import Recipe

REQUIRED = ("train", "eval")


@dataclass
class Lengths:
    """Lengths of rows, in tokens, before anything is cut."""

    limit: int  # `data.max_length`
    rows: int = 0
    total: int = 0
    longest: int = 0
    over: int = 0  # rows longer than the limit
    histogram: Counter[int] = field(default_factory=Counter)  # upper bound of a class of lengths → its rows

    def add(self, length: int) -> None:
        self.rows += 1
        self.total += length
        self.longest = max(self.longest, length)
        self.over += length > self.limit
        self.histogram[length_bound(length)] += 1

    def merge(self, others: dict[str, Any]) -> None:
        """Adds the result of `to_json` of another process."""
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
    """Cuts rows to `data.max_length` or drops them, and counts both.

    Rows of text are cut here. Of pairs, the trainers cut the answers; a score needs both answers whole. Rows packed by
    joining are neither cut nor dropped.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.limit = recipe.data.max_length
        self.lengths = Lengths(self.limit)
        self.truncated = self.dropped = 0
        self._joined = recipe.data.packing is True
        self._drops_long = recipe.data.quality.truncation == "fix"
        self._scores = recipe.training.spec.scores

    def fit(self, row: Row) -> Row:
        """Returns the row, cut where needed; raises RowError where it cannot be used, and counts it."""
        length = length_of(row)
        self.lengths.add(length)
        if self._joined:
            return row
        if length > self.limit:
            if self._drops_long:
                raise self._drop(f"{length} tokens, data.max_length is {self.limit}")
            self.truncated += 1
        if "labels" in row:
            row = {**row, "input_ids": row["input_ids"][: self.limit], "labels": row["labels"][: self.limit]}
            if len(row["labels"][1:]) == row["labels"][1:].count(IGNORED):
                raise self._drop(f"nothing to learn within data.max_length {self.limit}")
        elif self._scores or "length" in row:
            if length > self.limit:
                raise self._drop(f"{length} tokens, data.max_length is {self.limit}")
        elif len(row["prompt_ids"]) >= self.limit:
            raise self._drop(f"the prompt alone has {len(row['prompt_ids'])} tokens, data.max_length is {self.limit}")
        return row

    def _drop(self, reason: str) -> RowError:
        self.dropped += 1
        return RowError(reason)


def length_of(row: Row) -> int:
    """Returns a row's tokens: of a prompt with several answers, with the longest one."""
    if "length" in row:
        return int(row["length"])
    head = len(row["prompt_ids"]) if "prompt_ids" in row else 0
    return head + max(len(row[name]) for name in id_columns(row) if name != "prompt_ids")


def length_bound(length: int) -> int:
    """Returns the end of a length's class: powers of two and the middles between them, such as 64, 96, 128."""
    power = 1 << max(length - 1, 0).bit_length()
    middle = power * 3 // 4
    return middle if power >= 4 and length <= middle else power


def require_sequences(recipe: Recipe, counts: Mapping[str, int]) -> None:
    for side in REQUIRED:
        if counts[side] == 0:
            raise UserError(
                f"no {side} sequence is left after tokenizing with data.max_length {recipe.data.max_length}.",
                remedy="Raise max_length so that completions are reached, or give more text.",
            )


def judge_truncation(recipe: Recipe, lengths: dict[str, Any]) -> None:
    """Applies `data.quality.truncation`; raises UserError if it is `fail` and too many rows are too long."""
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


@dataclass
class TemplateErrors:
    """Counts rows that the template cannot render, or not so that the part in the loss is known."""

    of: int = 0  # rows of the split read; a pair that becomes two rows for `kto` is one
    rows: int = 0
    first: str = ""  # file, line and reason
    told: Counter[str] = field(default_factory=Counter)  # parts of the other rows that the template omits

    def add(self, file: str, line: int, reason: str) -> None:
        self.rows += 1
        self.first = self.first or f"{file}, line {line:,}: {reason}"

    def merge(self, others: dict[str, Any]) -> None:
        """Adds the result of `to_json` of a later segment."""
        self.of += others.get("of", 0)
        self.rows += others["rows"]
        self.first = self.first or others["first"]
        self.told.update(others["told"])

    def to_json(self) -> dict[str, Any]:
        return {"of": self.of, "rows": self.rows, "first": self.first, "told": dict(sorted(self.told.items()))}

    def judge(self, recipe: Recipe) -> None:
        limit, rows = recipe.data.max_rejected, self.of
        if self.rows > limit * rows:
            raise UserError(
                f"{self.rows:,} of {rows:,} conversations cannot be rendered by the chat template with the tokens in "
                f"the loss known ({self.rows / rows:.1%}; data.max_rejected is {limit:.1%}). The first is in "
                f"{self.first}.",
                remedy="Fix the data (data.quality.turns: fix drops conversations whose turns do not fit), set "
                "model.chat_template or data.train_on, or raise data.max_rejected.",
            )

    @staticmethod
    def tell(left_out: dict[str, int]) -> None:
        if left_out:
            events.emit(events.LeftOut(text=left_out_in_words(left_out), counts=left_out))


def left_out_in_words(told: dict[str, int]) -> str:
    by_itself = [what for what in told if what == UNENDED or what.startswith("columns ")]
    left = [f"{count:,} {what}" for what, count in told.items() if what not in by_itself]
    words = [f"{' and '.join(left)} that the chat template omits"] if left else []
    return "; ".join([*words, *(f"{told[what]:,} {what}" for what in by_itself)])
