"""The first rows of a recipe's sources, as they would be written, for people:
`python -m baton.data.head RECIPE_JSON_FILE COUNT SIDE TARGET`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

from baton import events
from baton.data.assign import SplitAssigner
from baton.data.ingest import Ingest
from baton.data.quality.inspect import Inspection
from baton.data.rows import Record, Rejected, RejectedRows
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.scratch import scratch_folder
from baton.store.storage import Storage

LOOKED_AT = 20_000
"""Rows that are looked at, at most, for those that are asked for."""
RAW = 2000
"""Characters of an unusable row that are shown."""


def head(recipe: Recipe, count: int, side: str | None, scratch: str) -> Iterator[dict[str, object]]:
    """Yields the first rows, of several sources in turn, each with its `file`, `line` and `side`.

    What needs all rows is not done: `data.split` in numbers or strata, for which the side is None, and the checks for
    duplicates and leakage.

    Args:
        recipe: The recipe, its paths absolute.
        count: Usable rows, and at most as many unusable ones that come between them.
        side: `train`, `eval` or `test`; None for all.
        scratch: Folder for files.

    Yields:
        Rows with their `row`, and unusable ones with the `reason` and what was read as `raw`.

    Raises:
        UserError: sources cannot be read, or a side is asked for that only all rows decide.
    """
    intake = Ingest(recipe, RejectedRows(f"{scratch}/rejected.jsonl"))
    inspection = Inspection(recipe, scratch)
    sides = SplitAssigner(recipe, Storage(f"{scratch}/store"))
    if side and sides.needs_all:
        raise UserError(
            "data.split holds out a number of rows or strata, so that a row's side is known once all rows are read.",
            remedy="Leave out --side.",
        )
    in_turn = chain.from_iterable(zip_longest(*(intake.outcomes(place) for place in range(len(intake.supplies)))))
    used = rejected = 0
    for outcome in islice((outcome for outcome in in_turn if outcome), LOOKED_AT):
        after = inspection.look(outcome) if isinstance(outcome, Record) else outcome
        if after is None:
            after = Rejected(outcome.file, outcome.line, inspection.findings.last, _raw(outcome))
        place: dict[str, object] = {"file": after.file, "line": after.line}
        if isinstance(after, Rejected):
            rejected += 1
            if rejected <= count:
                yield {**place, "side": None, "reason": after.reason, "raw": after.raw[:RAW]}
            continue
        where = None if sides.needs_all else sides.side(after)
        if side in (None, where):
            yield {**place, "side": where, "row": after.row}
            used += 1
        if used == count:
            return


def _raw(outcome: Record | Rejected) -> str:
    return outcome.content if isinstance(outcome, Record) else outcome.raw


def main(recipe_path: str, count: int, side: str | None, target: str) -> None:
    """Writes the first rows as JSON lines."""
    recipe = load.loads(Path(recipe_path).read_text(encoding="utf-8"))
    with scratch_folder("head") as scratch, open(target, "w", encoding="ascii") as file:
        file.writelines(json.dumps(row) + "\n" for row in head(recipe, count, side, scratch))


if __name__ == "__main__":
    with events.stage("data split"):
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3] or None, sys.argv[4])
