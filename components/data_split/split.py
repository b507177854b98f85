"""Data split: reads the source once, keeps what is broken, and puts each row on its side for good."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from baton.components.data_split import replay
from baton.components.data_split.intake import Intake
from baton.components.data_split.quality import Inspection, verdicts
from baton.components.data_split.records import Record, Refused, Spool
from baton.components.data_split.rows import Rejected
from baton.components.data_split.sampling import smallest, uses
from baton.components.data_split.sides import Sides
from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs import code, tracking
from baton.components.shared.runs.documents.data import SplitCounts, SplitData
from baton.components.shared.runs.run import Run, check_name
from baton.components.shared.store import bundles
from baton.components.shared.store.storage import Storage

SIDES = ("train", "eval", "test")
VERSION = 1
"""Of what the digest of a split stands for."""

NUM_REASONS = 3
SHOWN = 80
"""Reasons that are shown where no row can be used, and characters of an example."""
NONE_USABLE = "Check data.format and data.columns against the rows."

Placed = Iterator[tuple[Record, str]]
"""Records, each with its side."""


def split_data(recipe_json: str, run_name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Starts a run and splits its data.

    Args:
        recipe_json: The recipe as `recipe_file.dumps` writes it.
        run_name: Name of the run.
        changes: Dotted path → value, for what was filled in on the pipeline's page.

    Returns:
        `run_uri`, the counts `rows` (each once, whatever its weight), `train`, `eval`, `test` and `rejected`, and the
        `page` of what was found in the rows.

    Raises:
        UserError: no rows, too many broken ones, a side without rows, what a check of their quality does not allow, or
            a run of this name with another recipe.
    """
    started = time.time()
    recipe = with_changes(recipe_file.loads(recipe_json), changes)
    run = Run(Storage(recipe.store.uri), check_name(run_name))
    run.create(recipe)
    code.ship(run, recipe.hooks.source)
    tracking.start(run, recipe)
    with tempfile.TemporaryDirectory(prefix="baton-split-") as scratch:
        found, page = _split_into(recipe, run, scratch)
    run.write_once(SplitData(digest=found["digest"], rows=found["rows"]))
    run.put(SplitCounts.NAME, found)
    run.record("data-split", {"seconds": time.time() - started})
    events.emit("split", **{key: found[key] for key in ("format", "rows", *SIDES, "rejected")})
    return {"run_uri": run.uri, **found, "page": page}


def _split_into(recipe: Recipe, run: Run, scratch: str) -> tuple[dict[str, Any], str]:
    """Writes and commits the sides, and returns what they are and the page about their rows."""
    folder = f"{scratch}/sides"
    os.mkdir(folder)
    refused = Refused(f"{scratch}/rejected.jsonl")
    intake = Intake(recipe, refused)
    inspection = Inspection(recipe, scratch)
    sides, placed = _placed(recipe, run, scratch, intake, refused, inspection)
    settled = _settled(placed, inspection, scratch)
    if recipe.retrain.learnt:
        settled = replay.replayed(settled, recipe, run.storage, scratch)
    written = _write(recipe, settled, folder)
    found = {
        **written,
        "source": ", ".join(source.uri for source in recipe.data.sources),
        "sources": [supply.summary() for supply in intake.supplies],
        "format": intake.format,
        "pinned": sides.pinned,
        "rejected": refused.count,
        "rejected_uri": run.storage.uri(run.path("rejected.jsonl")) if refused.count else None,
    }
    page = verdicts.keep(run, inspection, found, refused.path)
    _check_sides(recipe, found, inspection.dropped)
    prefix = f"data/{found['digest']}/split"
    if bundles.usable_manifest(run.storage, prefix) is None:
        bundles.publish(run.storage, prefix, folder, kind="split", meta=found)
    return found, page


def with_changes(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """Returns the recipe with values from the pipeline's parameters, checked like any recipe."""
    document = recipe.model_dump(mode="json")
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        (document[section] if section else document)[key] = value
    return recipe_file.validate(document, origin="pipeline parameters")


def _placed(
    recipe: Recipe, run: Run, scratch: str, intake: Intake, refused: Refused, inspection: Inspection
) -> tuple[Sides, Placed]:
    """Returns the rule of the sides, and each record with its side."""
    data = recipe.data
    records = intake.records()
    if data.max_samples and data.shuffle:
        records = smallest(Spool(records, f"{scratch}/all.jsonl"), recipe.seed, data.max_samples)
    records = _then(islice(records, data.max_samples), lambda: _check_refused(recipe, run, intake, refused))
    records = (after for record in records if (after := inspection.look(record)))
    sides = Sides(recipe, run.storage)
    if sides.needs_all:
        spool = Spool(records, f"{scratch}/chosen.jsonl")
        sides.settle(spool)
        records = iter(spool)
    return sides, ((record, sides.side(record)) for record in records)


def _then(records: Iterator[Record], check: Callable[[], None]) -> Iterator[Record]:
    yield from records
    check()


def _settled(placed: Placed, inspection: Inspection, scratch: str) -> Placed:
    """Yields the records that stay once all are known: some are dropped for what they have in common with others."""

    def remembered() -> Iterator[Record]:
        for record, side in placed:
            inspection.place(record, side)
            yield replace(record, side=side)

    for record in inspection.settle(Spool(remembered(), f"{scratch}/placed.jsonl")):
        yield record, record.side


def _write(recipe: Recipe, placed: Placed, folder: str) -> dict[str, Any]:
    """Writes the sides, and returns their digest and counts.

    The digest is of what is written, and of the settings by which the next stage tells one column from another.
    """
    weights = [source.weight for source in recipe.data.sources]
    digest = hashlib.sha256(json.dumps([VERSION, recipe.data.extra_columns]).encode())
    counts = {"rows": 0, **dict.fromkeys(SIDES, 0)}
    with contextlib.ExitStack() as stack:
        files = {side: stack.enter_context(open(f"{folder}/{side}.jsonl", "wb")) for side in SIDES}
        for record, side in placed:
            line = record.content.encode() + b"\n"
            times = uses(record.content, recipe.seed, weights[record.source]) if side == "train" else 1
            counts["rows"] += 1
            for _ in range(times):
                digest.update(side.encode() + hashlib.sha256(line).digest())
                files[side].write(line)
                counts[side] += 1
    return {"digest": digest.hexdigest(), **counts}


def _check_refused(recipe: Recipe, run: Run, intake: Intake, refused: Refused) -> None:
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
    events.emit("rejected", count=refused.count, of=total, first=example, uri=uri)
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
            remedy="Write the file again, or set data.max_rejected to 1 to go on with what can be read.",
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


def _check_sides(recipe: Recipe, found: dict[str, Any], num_dropped: int) -> None:
    if found["rows"] == 0 and num_dropped:
        raise UserError(
            f"no row of data.source {found['source']!r} is left: data.quality dropped all {num_dropped} of them.",
            remedy="Set the checks that dropped them to warn; the page of this stage names them.",
        )
    if found["rows"] == 0:
        raise UserError(f"data.source {found['source']!r} holds no rows.", remedy="Check the path and data.columns.")
    split = recipe.data.split
    wanted = [side for side in SIDES if side != "test" or split.test]
    given = split.column is not None or any(source.side for source in recipe.data.sources)
    for side in wanted:
        if found[side] == 0:
            sizes = f"data.split.{'test' if side == 'test' else 'eval'} {getattr(split, side, split.eval):g}"
            raise UserError(
                f"{'the given split' if given else sizes} leaves no {side} rows of {found['rows']}.",
                remedy="Change the fraction or give more rows.",
            )
