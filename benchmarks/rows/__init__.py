"""Rows of the benchmark: one module each, with `NAME`, `TITLE` and `measure`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType

from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.rows import (
    boundary,
    bytes,
    frontier,
    goodput,
    imports,
    memory,
    notice,
    restart,
    restore,
    save_stall,
    searches,
    sweep,
    tokenize,
    virtual,
)
from benchmarks.server import RATE, ROUND_TRIP_S
from benchmarks.table import Row
from benchmarks.theirs import Theirs

NETWORK = f"{ROUND_TRIP_S * 1000:.0f} ms and {RATE / 1e6:.0f} MB/s"


@dataclass(frozen=True)
class Entry:
    """A row, and the network by which the server is reached."""

    module: ModuleType
    is_slow: bool = False

    @property
    def title(self) -> str:
        title: str = self.module.TITLE
        return f"{title}, over {NETWORK}" if self.is_slow else title

    def measure(self, bench: Bench, ours: Ours, theirs: Theirs) -> Row:
        with bench.server.slower() if self.is_slow else nullcontext():
            row: Row = self.module.measure(bench, ours, theirs)
        if not self.is_slow:
            return row
        note = f"network: a front of the server passes on {RATE / 1e6:.0f} MB/s each way; round trip {ROUND_TRIP_S} s"
        return replace(row, title=self.title, notes=[*row.notes, note])


MODULES = (
    save_stall,
    frontier,
    bytes,
    restore,
    imports,
    boundary,
    restart,
    goodput,
    notice,
    memory,
    tokenize,
    virtual,
    sweep,
    searches,
)
OVER_NETWORK = (restore, boundary)
ALL: dict[str, Entry] = {}
"""The rows by name, in the order in which they are measured."""
for module in MODULES:
    ALL[module.NAME] = Entry(module)
    if module in OVER_NETWORK:
        ALL[f"{module.NAME}-network"] = Entry(module, is_slow=True)
