"""Data split: reads each source once, keeps broken rows, and puts each row on its side for good.

All usable rows are in one scratch file. Sampling, sides, duplicates, leakage and replay choose among them by arrays
with a number a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any, BinaryIO

import numpy as np

from baton import events
from baton.checkpoint import seals
from baton.checkpoint.store import CheckpointStore
from baton.data import ingest
from baton.data.assign import SplitAssigner, position, smallest_draws, times_used
from baton.data.quality import Inspection, source_in_words, write_quality
from baton.data.rows import SIDES, Record, RejectedRows, Spool
from baton.errors import FormatError, UserError
from baton.models import user_code
from baton.pages import quality_page
from baton.pages.card import Card, table, visible
from baton.recipe.recipe import Recipe
from baton.runs import documents, objects
from baton.runs.origins import OriginsWriter
from baton.runs.ref import RunRef
from baton.runs.run import Run, check_name, now
from baton.runs.versions import FORMATS, release
from baton.scratch import scratch_folder
from baton.store import bundle
from baton.store.manifest import mark_damaged, usable_manifest
from baton.store.storage import Storage
from baton.tracking import servers, tracking_run

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CommittedSplit:
    """The sides of a run, committed to the store."""

    counts: dict[str, Any]
    page: str
    address: str
    first: dict[str, list[str]]


def split_data(recipe: Recipe, run_name: str) -> dict[str, Any]:
    """Starts a run and splits its data.

    Returns:
        `run_uri`, the counts `rows` (each once, whatever its weight), `train`, `eval`, `test` and `rejected`, the
        `page` of findings in the rows, their `address` and the `first` of each side.

    Raises:
        UserError: no rows, too many broken ones, a side without rows, a finding that a check of quality does not allow,
            or a run of this name with another recipe.
    """
    run = Run(Storage(recipe.store.uri), check_name(run_name))
    with seals.stage(run, objects.SPLIT):
        return _split(recipe, run)


def _split(recipe: Recipe, run: Run) -> dict[str, Any]:
    started = time.time()
    # First: a run name of another recipe is refused before a row is read or anything is written.
    run.create(recipe)
    user_code.ship(run, recipe.hooks.source, recipe.trust)
    tracking_run.start(run, recipe)
    is_older = run.need(documents.RunInfo).made.number("rows") != FORMATS["rows"].number
    with scratch_folder("split") as scratch:
        split = _kept(run, scratch) if is_older else write_splits(recipe, run, scratch)
        rows: list[dict[str, Any]] = []
        for side in SIDES:
            with open(f"{scratch}/sides/{side}.jsonl", "rb") as file:
                rows += map(json.loads, islice(file, SHOWN))
        columns = tracking_run.dataset_columns(rows)
    counts = split.counts
    # After the rows are committed: once this is there, a run has its data, and never other ones.
    run.write_once(documents.SplitData(digest=counts["digest"], rows=counts["rows"]))
    run.put(documents.SplitCounts.NAME, {**counts, "columns": columns})
    tracking_run.log_data(run, recipe)
    run.record("data-split", {"seconds": time.time() - started})
    events.emit(events.Split(**{key: counts[key] for key in ("format", "rows", *SIDES, "rejected")}))
    return {"run_uri": run.uri, **counts, "page": split.page, "address": split.address, "first": split.first}


def write_splits(recipe: Recipe, run: Run, scratch: str) -> CommittedSplit:
    folder = f"{scratch}/sides"
    os.mkdir(folder)
    data, storage = recipe.data, run.storage
    refused = RejectedRows(f"{scratch}/rejected.jsonl")
    intake = ingest.Ingest(recipe, refused)
    inspection = Inspection(recipe, scratch)
    records = intake.records()
    if data.max_samples and data.shuffle:
        records = smallest_draws(Spool(records, f"{scratch}/all.jsonl"), recipe.seed, data.max_samples)
    rows = Spool(_looked_at(islice(records, data.max_samples), inspection), f"{scratch}/rows.jsonl")
    ingest.check_rejected(recipe, run, intake, refused)
    assigner = SplitAssigner(recipe, storage)
    sides = assigner.assign(rows)
    kept = inspection.resolve(rows, sides)
    if recipe.retrain.learnt:
        kept = with_replayed(kept, rows, sides, recipe, storage, scratch)
    with (
        OriginsWriter(f"{scratch}/{documents.ORIGINS}")
        if recipe.training.guard
        else contextlib.nullcontext() as origins
    ):
        written = _write(recipe, compress(zip(rows, sides, strict=True), kept), folder, origins)
    if origins:
        storage.upload(origins.path, run.path(documents.ORIGINS))
    counts = {
        **written,
        "source": ", ".join(source.uri for source in data.sources),
        "sources": [supply.summary() for supply in intake.supplies],
        "format": intake.format,
        "pinned": assigner.pinned,
        "rejected": refused.count,
        "rejected_uri": storage.uri(run.path("rejected.jsonl")) if refused.count else None,
    }
    page = write_quality(run, inspection, counts, refused.path)
    _check_sides(recipe, counts, inspection.dropped)
    prefix = f"data/{counts['digest']}/split"
    # Named by content: a split that is there, of whichever run, is this one, unless it has changed.
    manifest = bundle.undamaged(storage, prefix)
    here = {f"{side}.jsonl": bundle.file_sha256(f"{folder}/{side}.jsonl") for side in SIDES}
    if manifest and {name: entry["sha256"] for name, entry in manifest.files.items()} != here:
        mark_damaged(storage, prefix, manifest)
        manifest = None
    if manifest is None:
        manifest, _ = bundle.publish(storage, prefix, folder, kind="split", meta=counts)
    return CommittedSplit(counts, page, storage.uri(manifest.path(prefix)), first_rows(folder, SIDES))


def _looked_at(records: Iterable[Record], inspection: Inspection) -> Iterator[Record]:
    for record in records:
        if mended := inspection.look(record):
            inspection.remember(mended)
            yield mended


def with_replayed(kept: Array, rows: Spool, sides: Array, recipe: Recipe, storage: Storage, scratch: str) -> Array:
    """Returns the mask of held-out, new and replayed rows, for a model that has learnt `retrain.learnt`.

    Replayed rows make up `retrain.replay` of all training rows, as far as there are enough: those with the smallest
    draws by content and by the last learnt data, so that each retraining replays others. Learnt rows that are no longer
    in the source are not replayed.

    Raises:
        UserError: nothing is new, or the learnt data is gone.
    """
    learnt = _learnt(storage, recipe.retrain.learnt, scratch)
    numbers = np.fromiter((_number(record.content) for record in rows), np.uint64, len(rows))
    trained = kept & (sides == SIDES.index("train"))
    old = trained & np.isin(numbers, learnt)
    num_new = int((trained & ~old).sum())
    if not num_new:
        raise UserError(
            "data.source holds no training row that the accepted model has not learnt; rows may have been removed.",
            remedy="Set retrain.start to base, to train without the rows that are gone.",
        )
    share = recipe.retrain.replay
    count = min(round(num_new * share / (1 - share)), int(old.sum()))
    if not count:
        return kept & ~old
    key = f"replay:{recipe.retrain.learnt[-1]}"
    draws = np.fromiter((position(recipe.seed, f"{key}:{record.content}") for record in rows), np.uint64, len(rows))
    return kept & (~old | (draws <= np.sort(draws[old])[count - 1]))


def _learnt(storage: Storage, digests: list[str], scratch: str) -> Array:
    """Returns a number for each row of the learnt data: eight bytes a row."""
    parts = [np.empty(0, dtype=np.uint64)]
    for place, digest in enumerate(digests):
        prefix = f"data/{digest}/split"
        manifest = usable_manifest(storage, prefix)
        if manifest is None:
            raise UserError(
                f"{storage.uri(prefix)} is missing, and with it what the accepted model has learnt.",
                remedy="Set retrain.start to base: the next retraining then starts from the recipe's own model.",
            )
        folder = bundle.fetch(storage, prefix, manifest, f"{scratch}/learnt-{place}", names=["train.jsonl"])
        with open(os.path.join(folder, "train.jsonl"), encoding="utf-8") as file:
            parts.append(np.fromiter((_number(line.rstrip("\n")) for line in file), dtype=np.uint64))
    return np.concatenate(parts)


def _number(content: str) -> int:
    return position(0, f"learnt:{content}")


def _write(
    recipe: Recipe, placed: Iterable[tuple[Record, int]], folder: str, origins: OriginsWriter | None
) -> dict[str, object]:
    """Writes records to their sides, and the origins of training rows if asked; returns digest and counts.

    The digest is of the written rows, and of the settings by which the next stage tells one column from another.
    """
    weights = [source.weight for source in recipe.data.sources]
    digest = hashlib.sha256(json.dumps([FORMATS["rows"].number, recipe.data.extra_columns]).encode())
    counts = {"rows": 0, **dict.fromkeys(SIDES, 0)}
    labels: set[str] = set()
    with contextlib.ExitStack() as stack:
        files = {side: stack.enter_context(open(f"{folder}/{side}.jsonl", "wb")) for side in SIDES}
        for record, number in placed:
            side = SIDES[number]
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
        text = (
            f"all training rows have label {labels.pop()}: kto learns from good and bad answers, and the weight "
            "of the other side has no effect"
        )
        events.emit(events.NoEffect(text=text))
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


def _kept(run: Run, scratch: str) -> CommittedSplit:
    """Returns the rows of a run of another release: this one would make others. Raises FormatError without any."""
    data = run.read(documents.SplitData)
    manifest = usable_manifest(run.storage, data.prefix) if data else None
    if data is None or manifest is None:
        raise FormatError(
            f"run {run.name!r} was begun by another release, its rows are not there, and this Baton, {release()}, "
            "makes other ones.",
            remedy="Start the run under another name, or run its data split with the release that began it.",
        )
    folder = f"{scratch}/sides"
    bundle.fetch(run.storage, data.prefix, manifest, folder, names=[f"{side}.jsonl" for side in SIDES], in_place=False)
    counts = {**manifest.meta, **(run.raw(documents.SplitCounts.NAME) or {})}
    counts.pop("columns", None)
    address = run.storage.uri(manifest.path(data.prefix))
    return CommittedSplit(counts, quality_page.write(run), address, first_rows(folder, SIDES))


SHOWN, LONGEST = 5, 1000  # rows shown of a side, and bytes of each
COUNTS = ("train", "eval", "test", "rejected")


def first_rows(folder: str, sides: Iterable[str]) -> dict[str, list[str]]:
    """Returns the beginnings of the first lines of each side's file, and reads no more than these."""
    first = {}
    for side in sides:
        with open(f"{folder}/{side}.jsonl", "rb") as file:
            first[side] = [line for line in (_beginning(file) for _ in range(SHOWN)) if line]
    return first


def _beginning(file: BinaryIO) -> str:
    line = file.readline(LONGEST)
    if line and not line.endswith(b"\n") and file.readline():
        line += "…".encode()
    return line.rstrip(b"\n").decode("utf-8", "ignore")


def rows_card(run: Run, split: dict[str, Any], run_name: str) -> Card:
    """Returns the card of `split_data`'s result; a run is resumed by its name without the phase's."""
    recipe = run.recipe()
    url = servers.mlflow_url(run, recipe)
    parts = [" · ".join(f"{name} {split[name]:,}" for name in COUNTS)]
    if recipe.tracking.cards == "rows":
        for side, lines in split["first"].items():
            if lines:
                numbered = (f"{number}  {visible(line, LONGEST)}" for number, line in enumerate(lines, 1))
                parts.append("\n".join([side, *numbered]))
    parts += [source_in_words(source) for source in split["sources"]]
    places = {
        "rows": split["address"],
        "rejected": split["rejected_uri"],
        "run": run.uri,
        "MLflow": url,
        "report": f"{run.uri}/report.html, and at the stage report",
        "begun": run.need(documents.RunInfo).created,
        "resume": f"submit the same recipe with run_name {run_name}: it continues from the newest checkpoint",
    }
    facts = {name: split[name] for name in (*COUNTS, "rows", "digest", "address")}
    facts |= {"run": run.uri, "run_name": run_name, "mlflow": url}
    return Card("\n\n".join([*parts, table(places)]) + "\n", facts)


def quality_html(run: Run, page: str) -> str:
    """Returns the page about the rows for Kubeflow: without their text, where the recipe wants that."""
    if run.recipe().tracking.cards == "rows":
        return page
    return quality_page.render(quality_page.without_examples(quality_page.collect(run)))


@seals.sealed(objects.SPLIT, appends=False)
def run_ref(run: Run) -> RunRef:
    """Returns a run's baton, the same again as long as no stage that has finished is to run again."""
    # Kubeflow's cache knows a stage's inputs and not whether its output still exists: another baton makes it run again.
    losses = (run.read(documents.MissingArtifacts) or documents.MissingArtifacts()).losses
    if lost := _lost(run):
        run.warn(f"no cached stage is used: {lost} is no longer in the store")
        losses = [*losses, documents.MissingArtifact(at=now(), lost=lost)]
        # Counted for good: stages in Kubeflow's cache did not see the loss, even once the lost file is made again.
        run.write(documents.MissingArtifacts(losses=losses))
    info = run.need(documents.RunInfo)
    return RunRef(run.uri, info.created, len(losses) + info.voided)


def _lost(run: Run) -> str | None:
    """Returns the first lost product of this run's stages, or None."""
    records = run.storage.list(run.path("records"))
    for left in (each for each in objects.OBJECTS if each.is_left):
        if any(record.startswith(f"{left.writers[0]}-") for record in records) and run.raw(left.pattern) is None:
            return left.pattern
    tokens = run.read(documents.TokenizedRows)
    if tokens and bundle.undamaged(run.storage, tokens.prefix, most_bytes=0) is None:
        return tokens.prefix
    return _lost_checkpoint(run, records)


def _lost_checkpoint(run: Run, records: list[str]) -> str | None:
    """Returns the address of the furthest checkpoint, if there is no whole one at its step or beyond."""
    store = CheckpointStore(run)
    attempts = run.attempts() if any(record.startswith("train-chunk-") for record in records) else []
    reached = max(store.run.verified_step(), attempts[-1].to_step if attempts else 0)
    info = run.need(documents.RunInfo)
    if info.voided and (end := run.read(documents.RunEnd, info.voided)):  # later ones were withdrawn
        reached = min(reached, end.stable_until)
    newest = next(store.whole(), None)
    return store.prefix(reached) if reached and (newest is None or newest.step < reached) else None
