"""Rows to tokens, written once, by as many processes as there are."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.components.shared.core import events
from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.models import own_tokenizer, pinned
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import PinnedModels, RunHead, SplitData, Tokens, TokensMeta
from baton.components.shared.runs.plan import Plan, make_plan
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles
from baton.components.tokenize import address, bpe, lengths, refusals, segments, workers
from baton.components.tokenize.address import Address
from baton.components.tokenize.parts import COUNTED, TOKENIZER, Parts
from baton.components.tokenize.segments import Segment

SIDES = ("train", "eval", "test")
SHARD = "tokenize-shard"
BLOCKS_FROM = 2**30
"""Bytes of training tokens from which `data.order: auto` takes blocks."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What there is to tokenize.

    Attributes:
        run: The run.
        recipe: Its recipe.
        split: Digest of its split.
        base: Folder of the base model's files.
        address: Address of the tokens.
    """

    run: Run
    recipe: Recipe
    split: str
    base: str | None
    address: Address

    @property
    def prefix(self) -> str:
        """Path of the tokens."""
        return f"data/{self.address.digest}/tokens"


def tokenize_run(run_uri: str) -> dict[str, Any]:
    """Tokenizes a run's split, unless the same split was tokenized the same way before.

    Returns:
        `data_uri`, the counts `train`, `eval`, `test`, `tokens`, `truncated`, `dropped`, `steps`, the `lengths` of all
        rows before cutting, the `bytes` of training tokens, the `order` of their rows, the `digest`, the `address` of
        the files, the `first` sequences of each side and what has `no_effect`; `dropped_uri` says where the rows that
        are left out are named, if there are any, and `rendered` how texts became turns, if they did.

    Raises:
        UserError: the tokenizer cannot be had or does not fit, no sequence is left, too many are too long, or the run
            was begun by a Baton that this one does not continue.
    """
    started = time.time()
    job = _job(run_uri)
    run, recipe, prefix, (digest, turned, day) = job.run, job.recipe, job.prefix, job.address
    manifest = bundles.usable_manifest(run.storage, prefix)
    reused = manifest is not None
    if manifest is None:
        parts = Parts(run.storage, prefix)
        with scratch_folder("tokens") as scratch:
            manifest = _commit(parts, _make(job, parts, scratch), recipe, scratch)
    meta = TokensMeta.read(manifest.meta, run.storage.uri(prefix))
    facts = meta.model_dump(mode="json", exclude={"files", "first", "first_lines"}, exclude_unset=True)
    facts["order"] = order(recipe, meta.bytes)
    facts |= {name: value for name, value in (("rendered", turned), ("today", day)) if value}
    if meta.dropped:
        facts["dropped_uri"] = run.storage.uri(manifest.path(prefix, "dropped"))
    run.put(Tokens.NAME, {"prefix": prefix, "digest": digest, **facts})
    lengths.judge(recipe, meta.lengths)
    refusals.Refusals.tell(meta.left_out)
    plan = make_plan(recipe, meta.train)
    run.write_once(plan)
    run.record("tokenize", {"seconds": time.time() - started, "reused": reused})
    no_effect = without_effect(recipe, plan, pad_is_end=_pad_is_end(job))
    for text in no_effect:
        events.emit(events.NoEffect(text=text))
    told = {"reused": reused, "steps": plan.num_steps, "targets": list(plan.targets), **facts}
    if turned and recipe.tracking.cards == "rows":
        told["rendered_row"] = next(iter(meta.first.get("train", ())), None)
    events.emit(events.Tokens.read(told))  # another Baton may have written the facts
    places = {"data_uri": run.storage.uri(prefix), "address": run.storage.uri(manifest.path(prefix))}
    found = {**places, "digest": digest, "steps": plan.num_steps, "first": meta.first, "no_effect": no_effect}
    return {**found, **facts}


def without_effect(recipe: Recipe, plan: Plan, *, pad_is_end: bool = False) -> list[str]:
    """Returns what a recipe asks for and does not get, now that the number of steps is known.

    Args:
        recipe: The recipe.
        plan: The run's plan.
        pad_is_end: Whether rows are filled up with the token that ends them.
    """
    training, evaluation, last = recipe.training, recipe.evaluation, plan.num_steps
    told = []
    if training.warmup_steps >= max(last, 1):
        told.append(
            f"training.warmup_steps is {training.warmup_steps:g} and the run has {last:,} steps, so that the learning "
            "rate does not come to its peak: give a share such as 0.1"
        )
    if training.early_stopping and evaluation.in_training:
        per_epoch = evaluation.per_epoch
        count = (
            sum(plan.is_due(step, per_epoch) for step in range(1, last + 1))
            if per_epoch
            else last // (evaluation.every or 1)
        )
        patience = training.early_stopping.patience
        if count <= patience:
            told.append(
                f"training.early_stopping cannot end the run: there are {count:,} evaluations in {last:,} steps, and "
                f"patience is {patience:,}: evaluate more often, or lower it"
            )
    elif evaluation.every and evaluation.every > last:
        told.append(f"evaluation.every is {evaluation.every:,}, and the run has {last:,} steps: nothing is evaluated")
    for name, step in (
        ("training.log_every", training.log_every),
        ("chunks.checkpoint_every", recipe.chunks.every_steps or 0),
    ):
        if step > last:
            told.append(f"{name} is {step:,}, and the run has {last:,} steps")
    if training.guard and (after := [step for step in training.guard.skip if step > last]):
        told.append(f"training.guard.skip has step {after[0]:,}, and the run has {last:,}")
    if pad_is_end and training.method == "reward":
        told.append(
            "rows are filled up with the token that ends them, so that a reward model reads its score before the end: "
            "set model.tokenizer.special_tokens.pad_token"
        )
    return told


def _pad_is_end(job: Job) -> bool:
    """Tells whether a reward model's rows are filled up with the token that ends them; of others nobody asks."""
    if job.recipe.training.method != "reward" or address.is_learned(job.recipe):
        return False
    tokenizer = own_tokenizer.make(job.recipe, job.base)
    return tokenizer.pad_token_id == tokenizer.eos_token_id


def tokenize_shard(run_uri: str, index: int, of: int) -> None:
    """Makes the parts of a run's tokens that fall to one of several processes, unless they are there; commits nothing.

    The others may run at the same time or have died: `tokenize_run` makes what is missing, and commits all.

    Args:
        run_uri: The run.
        index: Which process, from 1; 0 makes the tokenizer alone.
        of: How many there are.

    Raises:
        UserError: as `tokenize_run`, but for what only all parts together tell.
    """
    started = time.time()
    job = _job(run_uri)
    reused = bundles.usable_manifest(job.run.storage, job.prefix) is not None
    if not reused:
        with scratch_folder("tokens") as scratch:
            _make(job, Parts(job.run.storage, job.prefix), scratch, index=index, of=of)
    # A number in the name, as of a chunk: one that is done does not stand for the others.
    record = {"stage": SHARD, "seconds": time.time() - started, "reused": reused}
    job.run.record(f"{SHARD}-{index:03d}", record)


def dealt(wanted: Sequence[Segment], index: int, of: int) -> Sequence[Segment]:
    """Returns the segments of one of several processes: a function of the files and these two numbers alone."""
    return wanted[index - 1 :: of] if index else []


def order(recipe: Recipe, num_bytes: int) -> str:
    """Returns the order of training rows: what `data.order` says, and for `auto` what their bytes ask for."""
    if recipe.data.order != "auto":
        return recipe.data.order
    return "blocks" if num_bytes >= BLOCKS_FROM and recipe.needs_all_rows is None else "uniform"


def _job(run_uri: str) -> Job:
    run = Run.open(run_uri)
    run.require_continued()
    recipe = run.recipe()
    folders = pinned.fetch(recipe)
    pinned.check_second_model(recipe, folders)
    base, pins = folders.get(pinned.BASE), pinned.document(recipe, folders, run.read(PinnedModels))
    run.write_once(pins)
    split = run.need(SplitData).digest
    found = address.of(run, recipe, split, base, pins.base_sha256)
    found.tell_day()
    return Job(run=run, recipe=recipe, split=split, base=base, address=found)


def _make(job: Job, parts: Parts, scratch: str, *, index: int = 1, of: int = 1) -> dict[str, dict[str, Any]]:
    """Makes the parts of one of several processes that are not there yet; returns all of its parts in order."""
    recipe, storage = job.recipe, job.run.storage
    manifest = address.split_manifest(job.run, job.split)
    sides = [side for side in SIDES if f"{side}.jsonl" in manifest.files]
    names = [f"{side}.jsonl" for side in sides]
    source = bundles.fetch(storage, f"data/{job.split}/split", manifest, f"{scratch}/split", names=names)
    done = parts.done()
    if TOKENIZER not in done:
        bpe.of_run(recipe, job.base, f"{source}/train.jsonl").save_pretrained(f"{scratch}/own")
        done[TOKENIZER] = parts.put_tokenizer(f"{scratch}/own")
    # The one that counts, which may be another writer's: all segments must be made by it.
    tokenizer = parts.fetch_tokenizer(done[TOKENIZER], f"{scratch}/{TOKENIZER}")
    # Cut before they are dealt: where a segment begins does not depend on how many processes there are.
    wanted = dealt([segment for side in sides for segment in segments.cut(f"{source}/{side}.jsonl", side)], index, of)
    missing = [segment for segment in wanted if segment.name not in done]
    if len(missing) < len(wanted):
        events.emit(events.Resumed(parts=len(wanted) - len(missing), of=len(wanted)))
    wide = bool(missing) and segments.are_wide(recipe, (f"{source}/{name}" for name in names))
    number = job.run.need(RunHead).made.number("tokens")
    work = functools.partial(
        segments.make, recipe=recipe, tokenizer_folder=tokenizer, folder=scratch, wide=wide, number=number
    )
    left = len(missing)
    for segment, made in workers.each(missing, work, recipe.data.workers):
        done[segment.name] = parts.add(made)
        left -= 1
        events.emit(events.Tokenized(part=segment.name, done=len(wanted) - left, of=len(wanted)))
    return {name: done[name] for name in (TOKENIZER, *(segment.name for segment in wanted))}


def _commit(parts: Parts, done: dict[str, dict[str, Any]], recipe: Recipe, scratch: str) -> bundles.Manifest:
    files: dict[str, bundles.FileEntry] = {}
    rows: dict[str, list[tuple[str, int]]] = {side: [] for side in SIDES}
    counts = dict.fromkeys(COUNTED, 0)
    longest = lengths.Lengths(recipe.data.max_length)
    first: dict[str, list[str]] = {}
    refused = refusals.Refusals()
    for name, part in done.items():
        files |= part["files"]
        if name == TOKENIZER:
            continue
        side = name.rpartition("-")[0]
        rows[side] += [(file, part["rows"]) for file in part["files"] if file.endswith(".arrow")]
        counts["tokens"] += part["tokens"] if side == "train" else 0
        counts["truncated"] += part["truncated"]
        counts["dropped"] += part["dropped"]
        if "refused" in part:  # which a segment made by an older Baton lacks, as it does the next
            refused.merge(part["refused"])
        if "of" not in part.get("refused", {}):  # an older one counted what rows had become
            refused.of += part["lengths"]["rows"] + part.get("refused", {"rows": 0})["rows"]
        longest.merge(part["lengths"])
        first |= {side: part["first"]} if "first" in part else {}
    counts |= {side: sum(count for _, count in parts_of_side) for side, parts_of_side in rows.items()}
    refused.judge(recipe)
    lengths.require_some(recipe, counts)
    for side, parts_of_side in rows.items():
        if parts_of_side:
            files |= _describe(parts, side, [name for name, _ in parts_of_side], scratch)
    counts["bytes"] = sum(files[name]["size"] for name, _ in rows["train"])
    meta = TokensMeta(
        **counts,
        left_out=dict(refused.told),
        lengths=longest.to_json(),
        files=rows,
        first=first,
        refused=refused.rows,
        first_lines=_first_lines(done),
    )
    return parts.commit(files, meta.to_json())


def _first_lines(done: dict[str, dict[str, Any]]) -> list[int]:
    """Returns where each file to train on begins; nothing where segments made by an older Baton do not say it."""
    parts = [part for name, part in done.items() if name.startswith("train-") and part["rows"]]
    return [part["first_line"] for part in parts] if all("first_line" in part for part in parts) else []


def _describe(parts: Parts, side: str, names: list[str], scratch: str) -> dict[str, bundles.FileEntry]:
    """Writes what makes a side's files a folder that `datasets.load_from_disk` reads."""
    state: dict[str, object] = {
        "_data_files": [{"filename": name.removeprefix(f"{side}/")} for name in names],
        "_fingerprint": hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    entries = {}
    for name, document in (("state.json", state), ("dataset_info.json", {})):
        path = os.path.join(scratch, name)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, sort_keys=True)
        entries[f"{side}/{name}"] = parts.put_file(f"{side}/{name}", path)
    return entries
