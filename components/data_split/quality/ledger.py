"""The findings in the rows: a line each in `quality.jsonl`, a count and a few examples per check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.components.data_split.quality import private, texts
from baton.components.data_split.quality.texts import Row

Outcome = Literal["kept", "mended", "dropped"]
NUM_EXAMPLES = 5


@dataclass(frozen=True)
class Finding:
    """A check's finding in one row.

    Attributes:
        reason: In words.
        text: The whole text that it is in: what is private can be masked only before anything is cut.
        place: Where in it.
        mended: The row as `fix` leaves it; None where `fix` drops it.
    """

    reason: str
    text: str
    place: int = 0
    mended: Row | None = None


@dataclass
class Tally:
    """Rows in which one check found something."""

    found: int = 0
    mended: int = 0
    dropped: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


class Ledger:
    """Writes what is found, and keeps counts.

    Args:
        path: File for the lines.
        checks: Names of the checks.

    Attributes:
        last: What was found last, in words.
    """

    def __init__(self, path: str, checks: Sequence[str]) -> None:
        self.path = path
        self.lines = 0
        self.last = ""
        self.tallies = {check: Tally() for check in checks}
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def note(self, check: str, file: str, line: int, finding: Finding, outcome: Outcome, row: Row) -> None:
        """Keeps one finding.

        Args:
            check: Name of the check.
            file: Address of the row's file.
            line: Its line.
            finding: What was found.
            outcome: What became of the row.
            row: The row as it was; kept with it where it was mended or dropped, secrets and addresses masked.
        """
        tally = self.tallies[check]
        tally.found += 1
        tally.mended += outcome == "mended"
        tally.dropped += outcome == "dropped"
        entry: dict[str, object] = {
            "check": check,
            "outcome": outcome,
            "file": file,
            "line": line,
            "reason": private.masked(finding.reason),
        }
        if len(tally.examples) < NUM_EXAMPLES:
            tally.examples.append({**entry, "text": texts.excerpt(private.masked(finding.text), finding.place)})
        if outcome != "kept":
            entry["row"] = texts.changed_row(row, private.masked)
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.lines += 1
        self.last = f"data.quality.{check}: {entry['reason']}"

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
