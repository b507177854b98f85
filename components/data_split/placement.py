"""The rows of a source, each read once, on the side where it stays."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from baton.components.data_split import card, refusals, replay
from baton.components.data_split.intake import Intake
from baton.components.data_split.quality import Inspection, verdicts
from baton.components.data_split.records import Record, Refused, Spool
from baton.components.data_split.sampling import smallest, uses
from baton.components.data_split.sides import Sides
from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.formats import FORMATS
from baton.components.shared.runs.origins import ORIGINS, OriginsWriter
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles

SIDES = ("train", "eval", "test")

Placed = Iterator[tuple[Record, str]]
"""Records, each with its side."""


@dataclass(frozen=True)
class Split:
    """The sides of a run.

    Attributes:
        counts: What they are.
        page: What was found in their rows.
        address: Of the folder with their files.
        first: The first rows of each.
    """

    counts: dict[str, Any]
    page: str
    address: str
    first: dict[str, list[str]]


def split_into(recipe: Recipe, run: Run, scratch: str) -> Split:
    """Writes and commits the sides."""
    folder = f"{scratch}/sides"
    os.mkdir(folder)
    refused = Refused(f"{scratch}/rejected.jsonl")
    intake = Intake(recipe, refused)
    inspection = Inspection(recipe, scratch)
    sides, placed = _placed(recipe, run, scratch, intake, refused, inspection)
    remaining = _resolved(placed, inspection, scratch)
    if recipe.retrain.learnt:
        remaining = replay.replayed(remaining, recipe, run.storage, scratch)
    with OriginsWriter(f"{scratch}/{ORIGINS}") if recipe.training.guard else contextlib.nullcontext() as origins:
        written = _write(recipe, remaining, folder, origins)
    if origins:
        run.storage.upload(origins.path, run.path(ORIGINS))
    counts = {
        **written,
        "source": ", ".join(source.uri for source in recipe.data.sources),
        "sources": [supply.summary() for supply in intake.supplies],
        "format": intake.format,
        "pinned": sides.pinned,
        "rejected": refused.count,
        "rejected_uri": run.storage.uri(run.path("rejected.jsonl")) if refused.count else None,
    }
    page = verdicts.keep(run, inspection, counts, refused.path)
    _check_sides(recipe, counts, inspection.dropped)
    prefix = f"data/{counts['digest']}/split"
    # Named by content: what is there, of whichever run, is this.
    manifest = bundles.usable_manifest(run.storage, prefix)
    if manifest is None:
        manifest, _ = bundles.publish(run.storage, prefix, folder, kind="split", meta=counts)
    return Split(counts, page, run.storage.uri(manifest.path(prefix)), card.first_rows(folder, SIDES))


def _placed(
    recipe: Recipe, run: Run, scratch: str, intake: Intake, refused: Refused, inspection: Inspection
) -> tuple[Sides, Placed]:
    """Returns the rule of the sides, and each record with its side."""
    data = recipe.data
    records = intake.records()
    if data.max_samples and data.shuffle:
        records = smallest(Spool(records, f"{scratch}/all.jsonl"), recipe.seed, data.max_samples)
    records = _then(islice(records, data.max_samples), lambda: refusals.check(recipe, run, intake, refused))
    records = (after for record in records if (after := inspection.look(record)))
    sides = Sides(recipe, run.storage)
    if sides.needs_all:
        spool = Spool(records, f"{scratch}/chosen.jsonl")
        sides.set_cuts(spool)
        records = iter(spool)
    return sides, ((record, sides.side(record)) for record in records)


def _then(records: Iterator[Record], check: Callable[[], None]) -> Iterator[Record]:
    yield from records
    check()


def _resolved(placed: Placed, inspection: Inspection, scratch: str) -> Placed:
    """Yields the records that stay once all are known: some are dropped for what they have in common with others."""

    def remembered() -> Iterator[Record]:
        for record, side in placed:
            inspection.place(record, side)
            yield replace(record, side=side)

    for record in inspection.resolve(Spool(remembered(), f"{scratch}/placed.jsonl")):
        yield record, record.side


def _write(recipe: Recipe, placed: Placed, folder: str, origins: OriginsWriter | None) -> dict[str, object]:
    """Writes the sides, and where the rows to train on come from if that is asked for; returns their digest and counts.

    The digest is of what is written, and of the settings by which the next stage tells one column from another.
    """
    weights = [source.weight for source in recipe.data.sources]
    digest = hashlib.sha256(json.dumps([FORMATS["rows"].number, recipe.data.extra_columns]).encode())
    counts = {"rows": 0, **dict.fromkeys(SIDES, 0)}
    labels: set[str] = set()
    with contextlib.ExitStack() as stack:
        files = {side: stack.enter_context(open(f"{folder}/{side}.jsonl", "wb")) for side in SIDES}
        for record, side in placed:
            line = record.content.encode() + b"\n"
            times = uses(record.content, recipe.seed, weights[record.source]) if side == "train" else 1
            counts["rows"] += 1
            if times and side == "train":
                # Quotes within texts are escaped: it is the row's own key.
                labels |= {label for label in ("true", "false") if f'"label": {label}' in record.content}
            for _ in range(times):
                digest.update(side.encode() + hashlib.sha256(line).digest())
                files[side].write(line)
                counts[side] += 1
                if origins and side == "train":
                    origins.add(record.file, record.line)
    if recipe.training.method == "kto" and len(labels) == 1:
        told = (
            f"every row to train on has label {labels.pop()}: kto learns from good answers and from bad ones, and the "
        )
        events.emit(events.NoEffect(text=f"{told}weight of the other side has no effect"))
    return {"digest": digest.hexdigest(), **counts}


def _check_sides(recipe: Recipe, counts: dict[str, object], num_dropped: int) -> None:
    if counts["rows"] == 0 and num_dropped:
        raise UserError(
            f"no row of data.source {counts['source']!r} is left: data.quality dropped all {num_dropped} of them.",
            remedy="Set the checks that dropped them to warn; the page of this stage names them.",
        )
    if counts["rows"] == 0:
        raise UserError(f"data.source {counts['source']!r} holds no rows.", remedy="Check the path and data.columns.")
    split = recipe.data.split
    wanted = [side for side in SIDES if side != "test" or split.test]
    is_given = split.column is not None or any(source.side for source in recipe.data.sources)
    for side in wanted:
        if counts[side] == 0:
            sizes = f"data.split.{'test' if side == 'test' else 'eval'} {getattr(split, side, split.eval):g}"
            raise UserError(
                f"{'the given split' if is_given else sizes} leaves no {side} rows of {counts['rows']}.",
                remedy="Change the fraction or give more rows.",
            )
