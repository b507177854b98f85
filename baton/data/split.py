"""Data split: reads each source once, keeps broken rows, puts each row on its side, and shows the rows.

Replay adds a share of rows that the model has learnt before. The card in Kubeflow shows each side's first rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

from baton import events
from baton.data import ingest
from baton.data.assign import SplitAssigner, position, smallest_draws, times_used
from baton.data.ingest import Ingest
from baton.data.quality import inspect
from baton.data.quality.inspect import Inspection
from baton.data.rows import Record, RejectedRows, Spool
from baton.errors import FormatError, UserError
from baton.models import user_code
from baton.pages import quality_page
from baton.pages.card import Card, table, visible
from baton.recipe.recipe import Recipe
from baton.runs.documents import ORIGINS, RunInfo, SplitCounts, SplitData
from baton.runs.origins import OriginsWriter
from baton.runs.run import Run, check_name
from baton.runs.versions import FORMATS, release
from baton.scratch import scratch_folder
from baton.store import bundle
from baton.store.manifest import usable_manifest
from baton.store.storage import Storage
from baton.tracking import servers, tracking_run

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.uint64]]


# --- Replay: of the rows that a model has learnt already, a share is trained on again beside the new ones.


Placed = Iterator[tuple[Record, str]]
"""Records, each with its side."""


def with_replayed(placed: Placed, recipe: Recipe, storage: Storage, scratch: str) -> Placed:
    """Yields the records on which a model that has learnt `retrain.learnt` trains on.

    Those that are held out stay as they are. Of those to train on, the new ones, and so many of the others that they
    make up `retrain.replay` of the whole, as far as there are enough: those whose drawn numbers are smallest. The draw
    is by content and by what was learnt last, so that each retraining replays others. Rows that were learnt and are
    not in the source any more are not replayed.

    Args:
        placed: All records.
        recipe: Says what was learnt and the share.
        storage: The store, which has the data of that.
        scratch: Folder for files.

    Raises:
        UserError: nothing is new, or the data of what was learnt is gone.
    """
    learnt = _learnt(storage, recipe.retrain.learnt, scratch)
    # Gone through twice: the largest number that is drawn is known only after the last row.
    spool = Spool((replace(record, side=side) for record, side in placed), f"{scratch}/replay.jsonl")
    key = f"replay:{recipe.retrain.learnt[-1]}"
    drawn, num_new = [], 0
    for record in spool:
        if record.side != "train":
            continue
        if _is_in(learnt, record):
            drawn.append(position(recipe.seed, f"{key}:{record.content}"))
        else:
            num_new += 1
    if not num_new:
        raise UserError(
            "data.source holds no training row that the accepted model has not learnt; rows can have been removed.",
            remedy="Set retrain.start to base, to train without the rows that are gone.",
        )
    share = recipe.retrain.replay
    count = min(round(num_new * share / (1 - share)), len(drawn))
    # Below every number: none is drawn.
    last = sorted(drawn)[count - 1] if count else -1
    for record in spool:
        is_old = record.side == "train" and _is_in(learnt, record)
        if not is_old or position(recipe.seed, f"{key}:{record.content}") <= last:
            yield record, record.side


def _learnt(storage: Storage, digests: list[str], scratch: str) -> Numbers:
    """Returns a number for each row of the data that was learnt, ascending: eight bytes a row."""
    import numpy as np

    parts = [np.empty(0, dtype=np.uint64)]
    for place, digest in enumerate(digests):
        prefix = f"data/{digest}/split"
        manifest = usable_manifest(storage, prefix)
        if manifest is None:
            raise UserError(
                f"{storage.uri(prefix)} is gone, and with it what the accepted model has learnt.",
                remedy="Set retrain.start to base: the next retraining then starts from the recipe's own model.",
            )
        folder = bundle.fetch(storage, prefix, manifest, f"{scratch}/learnt-{place}", names=["train.jsonl"])
        with open(os.path.join(folder, "train.jsonl"), encoding="utf-8") as file:
            parts.append(np.fromiter((_number(line.rstrip("\n")) for line in file), dtype=np.uint64))
    return np.unique(np.concatenate(parts))


def _is_in(learnt: Numbers, record: Record) -> bool:
    number = learnt.dtype.type(_number(record.content))
    at = int(learnt.searchsorted(number))
    return at < len(learnt) and bool(learnt[at] == number)


def _number(content: str) -> int:
    return position(0, f"learnt:{content}")


# --- What data split leaves in Kubeflow: the first rows of each side, where all of them are, and where else the run
# is.


SHOWN, LONGEST = 5, 1000
"""Rows of a side, and bytes of each, that are shown."""
COUNTS = ("train", "eval", "test", "rejected")


def first_rows(folder: str, sides: Iterable[str]) -> dict[str, list[str]]:
    """Returns the beginnings of the first lines of each side's file, and reads no more than these."""
    first = {}
    for side in sides:
        with open(f"{folder}/{side}.jsonl", "rb") as file:
            first[side] = [line for line in (_beginning(file) for _ in range(SHOWN)) if line]
    return first


def whole_rows(folder: str, sides: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the first rows of each side's file."""
    rows = []
    for side in sides:
        with open(f"{folder}/{side}.jsonl", "rb") as file:
            rows += [json.loads(line) for line in islice(file, SHOWN)]
    return rows


def _beginning(file: BinaryIO) -> str:
    line = file.readline(LONGEST)
    if line and not line.endswith(b"\n") and file.readline():
        line += "…".encode()
    return line.rstrip(b"\n").decode("utf-8", "ignore")


def rows_card(run: Run, split: dict[str, Any], run_name: str) -> Card:
    """Returns the card of the rows.

    Args:
        run: The run.
        split: What `split_data` returned.
        run_name: The name by which the run is resumed: its own, without that of its phase.
    """
    recipe = run.recipe()
    url = servers.mlflow_url(run, recipe)
    parts = [" · ".join(f"{name} {split[name]:,}" for name in COUNTS)]
    if recipe.tracking.cards == "rows":
        for side, lines in split["first"].items():
            if lines:
                numbered = (f"{number}  {visible(line, LONGEST)}" for number, line in enumerate(lines, 1))
                parts.append("\n".join([side, *numbered]))
    parts += [inspect.source_in_words(source) for source in split["sources"]]
    places = {
        "rows": split["address"],
        "rejected": split["rejected_uri"],
        "run": run.uri,
        "MLflow": url,
        "report": f"{run.uri}/report.html, and at the stage report",
        "begun": run.need(RunInfo).created,
        "resume": f"submit the same recipe with run_name {run_name}: it continues from the newest checkpoint",
    }
    facts = {name: split[name] for name in (*COUNTS, "rows", "digest", "address")}
    facts |= {"run": run.uri, "run_name": run_name, "mlflow": url}
    return Card("\n\n".join([*parts, table(places)]) + "\n", facts)


def quality_html(run: Run, page: str) -> str:
    """Returns the page about the rows as Kubeflow may have it: without what they say, where the recipe wants that."""
    if run.recipe().tracking.cards == "rows":
        return page
    return quality_page.render(quality_page.without_examples(quality_page.collect(run)))


# --- The rows of a source, each read once, on the side where it stays.


SIDES = ("train", "eval", "test")


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


def write_splits(recipe: Recipe, run: Run, scratch: str) -> Split:
    """Writes and commits the sides."""
    folder = f"{scratch}/sides"
    os.mkdir(folder)
    refused = RejectedRows(f"{scratch}/rejected.jsonl")
    intake = Ingest(recipe, refused)
    inspection = Inspection(recipe, scratch)
    sides, placed = _placed(recipe, run, scratch, intake, refused, inspection)
    remaining = _resolved(placed, inspection, scratch)
    if recipe.retrain.learnt:
        remaining = with_replayed(remaining, recipe, run.storage, scratch)
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
    page = inspect.write_quality(run, inspection, counts, refused.path)
    _check_sides(recipe, counts, inspection.dropped)
    prefix = f"data/{counts['digest']}/split"
    # Named by content: what is there, of whichever run, is this.
    manifest = usable_manifest(run.storage, prefix)
    if manifest is None:
        manifest, _ = bundle.publish(run.storage, prefix, folder, kind="split", meta=counts)
    return Split(counts, page, run.storage.uri(manifest.path(prefix)), first_rows(folder, SIDES))


def _placed(
    recipe: Recipe, run: Run, scratch: str, intake: Ingest, refused: RejectedRows, inspection: Inspection
) -> tuple[SplitAssigner, Placed]:
    """Returns the rule of the sides, and each record with its side."""
    data = recipe.data
    records = intake.records()
    if data.max_samples and data.shuffle:
        records = smallest_draws(Spool(records, f"{scratch}/all.jsonl"), recipe.seed, data.max_samples)
    records = _then(islice(records, data.max_samples), lambda: ingest.check_rejected(recipe, run, intake, refused))
    records = (after for record in records if (after := inspection.look(record)))
    sides = SplitAssigner(recipe, run.storage)
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
            times = times_used(record.content, recipe.seed, weights[record.source]) if side == "train" else 1
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


# --- Data split: reads the source once, keeps what is broken, and puts each row on its side for good.


def split_data(recipe: Recipe, run_name: str) -> dict[str, Any]:
    """Starts a run and splits its data.

    Args:
        recipe: The recipe.
        run_name: Name of the run.

    Returns:
        `run_uri`, the counts `rows` (each once, whatever its weight), `train`, `eval`, `test` and `rejected`, the
        `page` of what was found in the rows, their `address` and the `first` of each side.

    Raises:
        UserError: no rows, too many broken ones, a side without rows, what a check of their quality does not allow, or
            a run of this name with another recipe.
    """
    started = time.time()
    run = Run(Storage(recipe.store.uri), check_name(run_name))
    # First: a name that is another recipe's is refused before a row is read or anything is written.
    run.create(recipe)
    user_code.ship(run, recipe.hooks.source, recipe.trust)
    tracking_run.start(run, recipe)
    is_older = run.need(RunInfo).made.number("rows") != FORMATS["rows"].number
    with scratch_folder("split") as scratch:
        split = _kept(run, scratch) if is_older else write_splits(recipe, run, scratch)
        columns = tracking_run.dataset_columns(whole_rows(f"{scratch}/sides", SIDES))
    counts = split.counts
    # After the rows are committed: once this is there, a run has its data, and never other ones.
    run.write_once(SplitData(digest=counts["digest"], rows=counts["rows"]))
    run.put(SplitCounts.NAME, {**counts, "columns": columns})
    tracking_run.log_data(run, recipe)
    run.record("data-split", {"seconds": time.time() - started})
    events.emit(events.Split(**{key: counts[key] for key in ("format", "rows", *SIDES, "rejected")}))
    return {"run_uri": run.uri, **counts, "page": split.page, "address": split.address, "first": split.first}


def _kept(run: Run, scratch: str) -> Split:
    """Returns the rows that a run of another release has, which it keeps: this one would make others.

    Raises:
        FormatError: it has none.
    """
    data = run.read(SplitData)
    manifest = usable_manifest(run.storage, data.prefix) if data else None
    if data is None or manifest is None:
        raise FormatError(
            f"run {run.name!r} was begun by another release, its rows are not there, and this Baton, {release()}, "
            "makes other ones.",
            remedy="Start the run under another name, or run its data split with the release that began it.",
        )
    folder = f"{scratch}/sides"
    names = [f"{side}.jsonl" for side in SIDES]
    bundle.fetch(run.storage, data.prefix, manifest, folder, names=names, in_place=False)
    counts = {**manifest.meta, **(run.get(SplitCounts.NAME) or {})}
    counts.pop("columns", None)
    address = run.storage.uri(manifest.path(data.prefix))
    return Split(counts, quality_page.write(run), address, first_rows(folder, SIDES))
