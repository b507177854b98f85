"""Rows that cannot be used: kept with the run, counted, and shown where there are too many."""

from __future__ import annotations

import os

from baton.components.data_split.intake import Intake
from baton.components.data_split.records import Refused
from baton.components.data_split.rows import Rejected
from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.run import Run

NUM_REASONS = 3
SHOWN = 80
"""Reasons that are shown where no row can be used, and characters of an example."""
NONE_USABLE = "Check data.format and data.columns against the rows."


def check(recipe: Recipe, run: Run, intake: Intake, refused: Refused) -> None:
    """Keeps what was rejected in the run, and judges how much it is.

    Raises:
        UserError: it is too much, or an unknown number of rows.
    """
    refused.close()
    if refused.first is None:
        return
    path = run.path("rejected.jsonl")
    run.storage.upload(refused.path, path)
    first, total, uri = refused.first, intake.used + refused.count, run.storage.uri(path)
    example = f"the first is {_place(first)}: {first.reason}"
    kept = f"They are kept with their reasons in {uri}."
    events.emit(events.Rejected(count=refused.count, of=total, first=example, uri=uri))
    if refused.count > recipe.data.max_rejected * total:
        raise UserError(
            f"{refused.count} of {total} rows are unusable, above data.max_rejected "
            f"{recipe.data.max_rejected:g}; {example if intake.used else _most_frequent(refused)}. {kept}",
            remedy="Mend the data or raise data.max_rejected." if intake.used else NONE_USABLE,
        )
    if (last := refused.broken_off) and recipe.data.max_rejected < 1:
        raise UserError(
            f"data.source: {last.file} cannot be read from line {last.line} on, and how many rows that loses is "
            f"unknown: {last.reason}.",
            remedy="Write the file again, or set data.max_rejected to 1 to continue with what can be read.",
        )
    if not intake.used:
        raise UserError(f"none of {total} rows is usable; {_most_frequent(refused)}. {kept}", remedy=NONE_USABLE)


def _most_frequent(refused: Refused) -> str:
    """Returns the most frequent reasons, each with its number of rows and the first of these."""
    reasons = sorted(refused.reasons.values(), key=lambda counted: -counted[0])
    shown = [
        f"{count} × {row.reason}, such as {_place(row)}: {' '.join(row.raw.split())[:SHOWN]!r}"
        for count, row in reasons[:NUM_REASONS]
    ]
    rest = f"\n  and {len(reasons) - NUM_REASONS} more reason(s)" if len(reasons) > NUM_REASONS else ""
    return "\n  ".join(["the reasons are:", *shown]) + rest


def _place(row: Rejected) -> str:
    return f"{os.path.basename(row.file)} line {row.line}"
