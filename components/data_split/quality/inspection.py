"""The checks of one split: rows pass through, are mended or dropped, and what was found is summed up."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from baton.components.data_split.quality import languages, private, rows, texts
from baton.components.data_split.quality.ledger import Finding, Ledger, Tally
from baton.components.data_split.quality.sets import CHECKS, NONE, SetChecks
from baton.components.data_split.quality.texts import Row
from baton.components.data_split.records import Record, as_content
from baton.components.shared.pages import quality_checks
from baton.components.shared.pages.quality_checks import Counts
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    import numpy as np

LEAST_ROWS, LEAST_ROWS_ADAPTER = 100, 50
"""Training rows below which `few_rows` speaks up: Unsloth's guide to datasets names 100 as the least for reasonable
results, OpenAI's guide to fine-tuning sees clear improvements from 50 to 100 rows."""

CHECKS_OF_ROWS = (*rows.CHECKS, "language", *CHECKS)
"""The checks of this stage that find rows; `few_rows` looks at their number, and `truncation` is the tokenizer's."""

LIKE = {"duplicates": "the same as", "near_duplicates": "nearly the same as", "leakage": "like the held-out"}


@dataclass
class _Column:
    rows: int = 0
    empty: int = 0
    characters: int = 0
    longest: int = 0

    def told(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "empty_share": round(self.empty / self.rows, 6),
            "mean_characters": round(self.characters / self.rows, 1),
            "longest": self.longest,
        }


class Inspection:
    """The checks of one split.

    Args:
        recipe: The recipe.
        scratch: Folder for what does not belong in memory.

    Attributes:
        dropped: Rows that were dropped so far.
    """

    def __init__(self, recipe: Recipe, scratch: str) -> None:
        self._recipe = recipe
        self._quality = recipe.data.quality
        self._checks = [(name, check) for name, check in rows.checks(recipe).items() if self._action(name) != "off"]
        self._ledger = Ledger(f"{scratch}/quality.jsonl", CHECKS_OF_ROWS)
        self._sets = SetChecks(self._quality, scratch)
        self._mix = languages.Mix()
        self._columns: dict[str, _Column] = {}
        self._looked_at = self.dropped = self._mended = 0
        self._left: Counter[str] = Counter()

    @property
    def ledger(self) -> tuple[str, int]:
        """File with a line for each finding, and how many it has."""
        return self._ledger.path, self._ledger.lines

    @property
    def last(self) -> str:
        """What was found last, in words."""
        return self._ledger.last

    def look(self, record: Record) -> Record | None:
        """Looks at one row.

        Returns:
            The row, mended where a check is to fix what it found, or None where the row is dropped.
        """
        self._looked_at += 1
        row = original = record.row
        self._measure(row)
        for name, check in self._checks:
            finding = check(row)
            after = row if finding is None else self._judge(name, finding, record.file, record.line, row)
            if after is None:
                break
            row = after
        else:
            if not self._is_foreign(row, record):
                self._mended += row is not original
                return record if row is original else replace(record, content=as_content(row))
        self.dropped += 1
        return None

    def _judge(self, check: str, finding: Finding, file: str, line: int, row: Row) -> Row | None:
        """Does with a row what the check's action says."""
        if self._action(check) != "fix" or finding.mended is row:
            self._ledger.note(check, file, line, finding, "kept", row)
            return row
        mended = finding.mended
        if mended is not None and texts.is_emptied(row, mended):
            mended = None
        self._ledger.note(check, file, line, finding, "dropped" if mended is None else "mended", row)
        return mended

    def _is_foreign(self, row: Row, record: Record) -> bool:
        """Counts a row's language, and tells whether the row is dropped for it."""
        expected = self._quality.languages
        if self._action("language") == "off" or not expected:
            return False
        text = texts.learned(row)
        code = languages.language(text)
        self._mix.count(code)
        if code in (languages.UNKNOWN, *expected):
            return False
        finding = Finding(f"language {code}, expected {' or '.join(expected)}", text)
        return self._judge("language", finding, record.file, record.line, row) is None

    def place(self, record: Record, side: str) -> None:
        """Remembers a row that is to be written on a side: `train`, `eval` or `test`."""
        row = record.row
        hashed = self._sets.add(record.content.encode(), row, side, record.file, record.line)
        if self._action("language") != "off" and not self._quality.languages:
            self._mix.offer(hashed, texts.learned(row))

    def resolve(self, records: Iterable[Record]) -> Iterator[Record]:
        """Looks at the rows that were placed together, and yields those that no check drops.

        Args:
            records: The rows, in the order in which they were placed.
        """
        partners = self._sets.find()
        for number, record in enumerate(records):
            if self._is_superfluous(number, record, partners):
                self.dropped += 1
            else:
                self._left[self._sets.side(number)] += 1
                yield record
        self._ledger.close()

    def _is_superfluous(self, number: int, record: Record, partners: dict[str, np.ndarray]) -> bool:
        """Notes what makes a row like another, and tells whether it is dropped for it."""
        for check in CHECKS:
            partner = int(partners[check][number]) if check in partners else NONE
            if partner == NONE:
                continue
            row = record.row
            file, line = self._sets.where(partner)
            place = "" if file == record.file else f"{os.path.basename(file)} "
            reason = f"{LIKE[check]} {place}line {line} ({self._sets.side(partner)})"
            finding = Finding(reason, texts.learned(row))
            if self._judge(check, finding, record.file, record.line, row) is None:
                return True
        return False

    def summary(self, counts: dict[str, int], unusable: list[dict[str, Any]], num_read: int) -> dict[str, Any]:
        """Returns what was found.

        Args:
            counts: Rows by what became of them: `train` (as often as it is used), `eval`, `test`, `rejected`.
            unusable: The first rejected rows: `file`, `line`, `reason`, `raw`.
            num_read: Rows that were read, the rejected ones among them.

        Returns:
            `rows`, `checks` (each with its action, verdict, rows found, of how many, share, mended, dropped and
            examples), `languages` and `columns`.
        """
        of = {"looked_at": self._looked_at, "mended": self._mended, "dropped": self.dropped}
        checks = {name: self._counted(self._ledger.tallies[name]) for name in CHECKS_OF_ROWS}
        checks["few_rows"] = _entry(min(counts["train"], self._left["train"]), self._least_rows, [])
        checks["rejected"] = _entry(counts["rejected"], num_read, [_unusable(row) for row in unusable])
        return {
            "method": self._recipe.training.method,
            "rows": {**counts, **of},
            "checks": {name: quality_checks.judged(name, check, self._recipe.data) for name, check in checks.items()},
            "languages": {"expected": self._quality.languages, **self._mix.result()},
            "columns": {name: column.told() for name, column in self._columns.items()},
        }

    def _counted(self, tally: Tally) -> Counts:
        return _entry(tally.found, self._looked_at, tally.examples, mended=tally.mended, dropped=tally.dropped)

    @property
    def _least_rows(self) -> int:
        return self._quality.least_rows or (LEAST_ROWS_ADAPTER if self._recipe.adapter else LEAST_ROWS)

    def _action(self, check: str) -> str:
        return str(getattr(self._quality, check))

    def _measure(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, str | list):
                length = sum(map(len, texts.texts(value)))
                column = self._columns.setdefault(name, _Column())
                column.rows += 1
                column.characters += length
                column.longest = max(column.longest, length)
                column.empty += length == 0 or not any(texts.has_visible(text, 1) for text in texts.texts(value))


def _unusable(row: dict[str, Any]) -> dict[str, object]:
    reason, text = private.masked(row["reason"]), texts.excerpt(private.masked(row["raw"][:10_000]))
    return {"file": row["file"], "line": row["line"], "reason": reason, "outcome": "dropped", "text": text}


def _entry(rows: int, of: int, examples: list[dict[str, Any]], *, mended: int = 0, dropped: int = 0) -> Counts:
    share = round(rows / of, 6) if of else 0.0
    return {"rows": rows, "of": of, "share": share, "mended": mended, "dropped": dropped, "examples": examples}
