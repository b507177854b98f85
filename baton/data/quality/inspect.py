"""Inspects a split: mends or drops rows, sums up findings, and ends the run if a check asks for it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from baton import events
from baton.data.quality import checks as rows
from baton.data.quality import pii
from baton.data.quality.checks import NUM_EXAMPLES, FindingsLog, Row, RowFinding
from baton.data.quality.dedup import DEDUP_CHECKS, NONE, DedupChecks
from baton.data.rows import SIDES, Record, Spool, as_content
from baton.errors import UserError
from baton.pages import quality_page
from baton.pages.quality_page import FINDINGS, QUALITY, CheckCounts, CheckVerdict
from baton.recipe.recipe import Recipe
from baton.runs.run import Run

LEAST_ROWS, LEAST_ROWS_ADAPTER = 100, 50
"""Least training rows without a finding of `few_rows`: Unsloth's guide to datasets names 100 as the least for
reasonable results, OpenAI's guide to fine-tuning sees clear improvements from 50 to 100 rows."""

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
    """The checks of one split: rows pass through, are mended or dropped, and findings are summed up."""

    def __init__(self, recipe: Recipe, scratch: str) -> None:
        self._recipe = recipe
        self._quality = recipe.data.quality
        checks = rows.row_checks(recipe)
        self._checks = [(name, check) for name, check in checks.items() if self._action(name) != "off"]
        # Those that find rows; `few_rows` looks at their number, and `truncation` is the tokenizer's.
        self.findings = FindingsLog(f"{scratch}/quality.jsonl", [*checks, "language", *DEDUP_CHECKS])
        self._sets = DedupChecks(self._quality, scratch)
        self._mix = rows.LanguageMix()
        self._columns: dict[str, _Column] = {}
        self._looked_at = self.dropped = self._mended = 0
        self._num_train = 0

    def look(self, record: Record) -> Record | None:
        """Returns a row, mended where a check fixes it, or None where it is dropped."""
        self._looked_at += 1
        row = original = record.row
        self._measure(row)
        for name, check in self._checks:
            finding = check(row)
            after = row if finding is None else self._judge(name, finding, record, row)
            if after is None:
                break
            row = after
        else:
            if not self._is_foreign(row, record):
                self._mended += row is not original
                return record if row is original else replace(record, content=as_content(row))
        self.dropped += 1
        return None

    def _judge(self, check: str, finding: RowFinding, record: Record, row: Row) -> Row | None:
        if self._action(check) != "fix" or finding.mended is row:
            self.findings.note(check, record, finding, "kept", row)
            return row
        mended = finding.mended
        if mended is not None and rows.is_emptied(row, mended):
            mended = None
        self.findings.note(check, record, finding, "dropped" if mended is None else "mended", row)
        return mended

    def _is_foreign(self, row: Row, record: Record) -> bool:
        """Counts a row's language, and tells whether the row is dropped for it."""
        expected = self._quality.languages
        if self._action("language") == "off" or not expected:
            return False
        text = rows.training_text(row)
        code = rows.language(text)
        self._mix.count(code)
        if code in (rows.UNKNOWN_LANGUAGE, *expected):
            return False
        finding = RowFinding(f"language {code}, expected {' or '.join(expected)}", text)
        return self._judge("language", finding, record, row) is None

    def remember(self, record: Record) -> None:
        hashed = self._sets.add(record)
        if self._action("language") != "off" and not self._quality.languages:
            self._mix.offer(hashed, rows.training_text(record.row))

    def resolve(self, records: Spool, sides: np.ndarray) -> np.ndarray:
        """Looks at all rows together, in the order of `remember`, and returns a bool for each: whether it is kept."""
        kept = np.ones(len(records), dtype=bool)
        partners = self._sets.find(sides)
        if any((each != NONE).any() for each in partners.values()):
            for number, record in enumerate(records):
                kept[number] = not self._is_superfluous(number, record, sides, partners)
        self.dropped += int((~kept).sum())
        self._num_train = int((kept & (sides == 0)).sum())
        self.findings.close()
        return kept

    def _is_superfluous(self, number: int, record: Record, sides: np.ndarray, partners: dict[str, np.ndarray]) -> bool:
        """Notes the rows that a row is like, and tells whether it is dropped for one."""
        for check in DEDUP_CHECKS:
            partner = int(partners[check][number]) if check in partners else NONE
            if partner == NONE:
                continue
            file, line = self._sets.where(partner)
            place = "" if file == record.file else f"{os.path.basename(file)} "
            reason = f"{LIKE[check]} {place}line {line} ({SIDES[sides[partner]]})"
            if self._judge(check, RowFinding(reason, rows.training_text(record.row)), record, record.row) is None:
                return True
        return False

    def summary(self, counts: dict[str, int], unusable: list[dict[str, Any]], num_read: int) -> dict[str, Any]:
        """Returns `rows`, `checks` (each with its action, verdict, rows found, of how many, share, mended, dropped and
        examples), `languages` and `columns`.

        Args:
            counts: `train` (as often as it is used), `eval`, `test`, `rejected`.
            unusable: The first rejected rows: `file`, `line`, `reason`, `raw`.
            num_read: Rows that were read, the rejected ones among them.
        """
        of = {"looked_at": self._looked_at, "mended": self._mended, "dropped": self.dropped}
        checks = {
            name: _entry(tally.found, self._looked_at, tally.examples, mended=tally.mended, dropped=tally.dropped)
            for name, tally in self.findings.tallies.items()
        }
        least = self._quality.least_rows or (LEAST_ROWS_ADAPTER if self._recipe.adapter else LEAST_ROWS)
        checks["few_rows"] = _entry(min(counts["train"], self._num_train), least, [])
        checks["rejected"] = _entry(counts["rejected"], num_read, [_unusable(row) for row in unusable])
        return {
            "method": self._recipe.training.method,
            "rows": {**counts, **of},
            "checks": {name: quality_page.judged(name, check, self._recipe.data) for name, check in checks.items()},
            "languages": {"expected": self._quality.languages, **self._mix.result()},
            "columns": {name: column.told() for name, column in self._columns.items()},
        }

    def _action(self, check: str) -> str:
        return str(getattr(self._quality, check))

    def _measure(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, str | list):
                length = sum(map(len, rows.texts_of(value)))
                column = self._columns.setdefault(name, _Column())
                column.rows += 1
                column.characters += length
                column.longest = max(column.longest, length)
                column.empty += length == 0 or not any(rows.has_visible(text, 1) for text in rows.texts_of(value))


def _unusable(row: dict[str, Any]) -> dict[str, object]:
    reason, text = pii.redact(row["reason"]), rows.excerpt(pii.redact(row["raw"][:10_000]))
    return {"file": row["file"], "line": row["line"], "reason": reason, "outcome": "dropped", "text": text}


def _entry(rows: int, of: int, examples: list[dict[str, Any]], *, mended: int = 0, dropped: int = 0) -> CheckCounts:
    share = round(rows / of, 6) if of else 0.0
    return {"rows": rows, "of": of, "share": share, "mended": mended, "dropped": dropped, "examples": examples}


def write_quality(run: Run, inspection: Inspection, split: dict[str, Any], rejected_path: str) -> str:
    """Writes `quality.json`, `quality.jsonl` and the page of a run, and returns the page.

    `split` has the counts `train`, `eval`, `test` and `rejected`, the counts of its `sources`, and `rejected_uri`.

    Raises:
        UserError: a check that is to fail found something; it is written all the same.
    """
    num_findings = inspection.findings.lines
    where = run.storage.uri(run.path(FINDINGS))
    if num_findings:
        run.storage.upload(inspection.findings.path, run.path(FINDINGS))
    counts = {name: split[name] for name in ("train", "eval", "test", "rejected")}
    num_read = sum(source["rows"] + source["rejected"] for source in split["sources"])
    with open(rejected_path, encoding="ascii") as file:
        first_rejected = [json.loads(line) for line in islice(file, NUM_EXAMPLES)]
    summary = inspection.summary(counts, first_rejected, num_read)
    places = {"findings_uri": where if num_findings else None, "rejected_uri": split["rejected_uri"]}
    run.put(QUALITY, {**summary, **places, "sources": [source_in_words(source) for source in split["sources"]]})
    page = quality_page.write(run)
    quality = quality_page.collect(run)
    events.emit(
        events.Quality(state=quality["state"], sentence=quality["sentence"], page=run.uri + f"/{quality_page.PAGE}")
    )
    require_verdicts(summary, where)
    return page


def source_in_words(source: dict[str, Any]) -> str:
    """Returns in one line the columns of a source by our names."""
    told = events.Source.read({"unused": None, **source})
    return f"{told.uri} holds {told.in_words}"


def require_verdicts(summary: dict[str, Any], where: str) -> None:
    """Raises UserError if a check that may end the run found something."""
    failed = {
        name: check
        for name, check in summary["checks"].items()
        if check["verdict"] == "failed" and name != "rejected"  # of which the split says more
    }
    if not failed:
        return
    place = f" All are in {where}." if set(failed) - {"few_rows"} else ""
    settings = " and ".join(f"data.quality.{name}" for name in failed)
    raise UserError(
        f"{'; '.join(_told(name, check) for name, check in failed.items())}.{place}",
        remedy=f"Mend the data, or set {settings} to warn or fix.",
    )


def _told(name: str, check: CheckVerdict) -> str:
    if name == "few_rows":
        return f"data.quality.few_rows: {check['rows']} training rows, at least {check['of']} are expected"
    first = check["examples"][0]
    return (
        f"data.quality.{name}: found in {check['rows']} of {check['of']} rows; "
        f"the first is {os.path.basename(first['file'])} line {first['line']}: {first['reason']}"
    )
