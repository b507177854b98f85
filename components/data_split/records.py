"""Rows on their way to a side: as they will be written, with where they come from; on disk where they are many."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, replace

from baton.components.data_split.rows import SHOWN, Rejected


@dataclass(frozen=True, slots=True)
class Record:
    """A row that can be used.

    Attributes:
        content: The row as JSON, keys sorted: what is written, and what decides its side.
        file: Address of its file.
        line: Line or row number, from 1.
        source: Place of its source in `data.source`, from 0.
        side: Side that the source gives it: `train`, `eval` or `test`; empty where its content decides.
        key: Value of the column that `data.split` stratifies or groups by; empty without one.
    """

    content: str
    file: str
    line: int
    source: int = 0
    side: str = ""
    key: str = ""

    @property
    def row(self) -> dict[str, object]:
        """The row, parsed anew each time."""
        return json.loads(self.content)


def as_content(row: dict[str, object]) -> str:
    """Returns a row as it is written: the same row is the same text.

    Keys of rows and messages are sorted; within tools and calls the order is the source's, for a chat template writes
    them as they come.
    """
    return json.dumps({name: _ordered(row[name]) for name in sorted(row)}, ensure_ascii=False)


def _ordered(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [dict(sorted(each.items())) if isinstance(each, dict) and "role" in each else each for each in value]


class Spool:
    """Records in a file, to be gone through more than once.

    Args:
        records: What to keep; gone through here.
        path: The file, which is written.

    Attributes:
        count: Number of records.
    """

    def __init__(self, records: Iterable[Record], path: str) -> None:
        self._path = path
        self.count = 0
        with open(path, "w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(astuple(record)) + "\n")
                self.count += 1

    def __iter__(self) -> Iterator[Record]:
        with open(self._path, encoding="utf-8") as file:
            for line in file:
                yield Record(*json.loads(line))


MAX_REASONS = 1000
"""Reasons that are counted. One may quote its row, so that there is one for each."""


class Refused:
    """Rows that are not used, in a file with their reasons: one JSON object a line, as `Rejected` has it.

    Args:
        path: The file, which is written as they come.

    Attributes:
        count: Number of rows.
        first: The first of them, its reason and text shortened.
        broken_off: The first that stands for the rest of its file.
        reasons: Reason → how many rows were refused for it, and the first of them, shortened; no new ones after
            `MAX_REASONS`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.count = 0
        self.first: Rejected | None = None
        self.broken_off: Rejected | None = None
        self.reasons: dict[str, tuple[int, Rejected]] = {}
        self._file = open(path, "w", encoding="ascii")  # noqa: SIM115 - closed by `close`

    def add(self, row: Rejected) -> None:
        """Keeps a row."""
        self._file.write(json.dumps(asdict(row)) + "\n")
        self.count += 1
        row = replace(row, reason=row.reason[:SHOWN], raw=row.raw[:SHOWN])  # those that are held in memory
        self.first = self.first or row
        if row.rest:
            self.broken_off = self.broken_off or row
        if row.reason in self.reasons or len(self.reasons) < MAX_REASONS:
            count, first = self.reasons.get(row.reason, (0, row))
            self.reasons[row.reason] = count + 1, first

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
