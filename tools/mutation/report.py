"""What became of the mutants: a table, and a page with a diff of each that survived."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.mutation.choosing import ROOT
from tools.mutation.equivalent import EQUIVALENT
from tools.mutation.operators import Mutant

GOAL = 0.95
OUTCOMES = ("killed", "timed out", "survived", "not run", "error", "equivalent")


def show(
    console: Console, mutants: Sequence[Mutant], chosen: Sequence[Mutant], results: Mapping[str, Any], page: Path
) -> int:
    """Prints the table, writes the page, and returns 1 where fewer are killed than is the goal.

    Args:
        console: Where to.
        mutants: All there are.
        chosen: Those that were drawn.
        results: Name → what has become of it.
        page: Where the survivors go.
    """
    of_file: dict[str, Counter[str]] = {}
    for mutant in chosen:
        outcome = "equivalent" if mutant.key in EQUIVALENT else results.get(mutant.key, {}).get("outcome", "not run")
        of_file.setdefault(mutant.path, Counter())[outcome] += 1
    there_are = Counter(mutant.path for mutant in mutants)
    table = Table("file", "mutants", "drawn", *OUTCOMES, "share")
    for path, counts in sorted(of_file.items()):
        table.add_row(path, str(there_are[path]), *_cells(counts))
    total = sum(of_file.values(), Counter[str]())
    table.add_section()
    table.add_row("all", str(len(mutants)), *_cells(total))
    console.print(table)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("".join(_page(chosen, results)), encoding="utf-8")
    console.print(f"survivors: {page}")
    return int(_share(total) < GOAL)


def _cells(counts: Counter[str]) -> list[str]:
    return [str(counts.total()), *(str(counts[outcome] or "") for outcome in OUTCOMES), f"{_share(counts):.1%}"]


def _share(counts: Counter[str]) -> float:
    """Returns the share that tests kill of those that can be killed; one that hangs is killed by the time limit."""
    killed = counts["killed"] + counts["timed out"]
    return killed / max(1, counts.total() - counts["equivalent"])


def _page(chosen: Sequence[Mutant], results: Mapping[str, Any]) -> list[str]:
    lines = ["# Mutants that survived\n\n"]
    for mutant in chosen:
        result = results.get(mutant.key, {"outcome": "not run", "by": ""})
        if mutant.key in EQUIVALENT or result["outcome"] in ("killed", "timed out"):
            continue
        lines += [f"## {mutant.key}\n\n{result['outcome']}, {result['by']}\n\n```diff\n", *diff(mutant), "```\n\n"]
    return lines


def diff(mutant: Mutant) -> list[str]:
    """Returns what a mutant changes."""
    source = (ROOT / mutant.path).read_bytes()
    before, after = (each.decode().splitlines(keepends=True) for each in (source, mutant.apply(source)))
    return list(difflib.unified_diff(before, after, mutant.path, "mutant", n=3))
