"""Data split: reads the source once, keeps what is broken, and puts each row on its side for good."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from components.data_split import formats, readers
from components.data_split.readers import Rejected, Row
from components.shared import bundles, code, events, recipe_file, tracking
from components.shared.errors import UserError
from components.shared.recipe import Recipe
from components.shared.runs import Run, check_name
from components.shared.storage import Storage

LOOKED_AT = 20
"""Rows whose columns decide the format."""


def split_data(recipe_json: str, run_name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Starts a run and splits its data.

    Args:
        recipe_json: The recipe as `recipe_file.dumps` writes it.
        run_name: Name of the run.
        changes: Dotted path → value, for what was filled in on the pipeline's page.

    Returns:
        `run_uri` and the counts `rows`, `train`, `eval`, `rejected`.

    Raises:
        UserError: no rows, too many broken ones, or a run of this name with another recipe.
    """
    started = time.time()
    recipe = with_changes(recipe_file.loads(recipe_json), changes)
    run = Run(Storage(recipe.store.uri), check_name(run_name))
    run.create(recipe)
    code.ship(run, recipe.hooks.source)
    tracking.start(run, recipe)
    with tempfile.TemporaryDirectory(prefix="baton-split-") as folder:
        found = _write_sides(recipe, folder)
        rejected = found.pop("rejected_rows")
        if rejected:
            lines = "".join(json.dumps(asdict(row)) + "\n" for row in rejected)
            run.storage.write(run.path("rejected.jsonl"), lines.encode("utf-8", "backslashreplace"))
            found["rejected_uri"] = run.storage.uri(run.path("rejected.jsonl"))
        _check(recipe, found, rejected)
        prefix = f"data/{found['digest']}/split"
        if bundles.usable_manifest(run.storage, prefix) is None:
            bundles.publish(run.storage, prefix, folder, kind="split", meta=found)
    run.set_once("data.json", {"digest": found["digest"], "rows": found["rows"]})
    run.put("split.json", found)
    run.record("data-split", {"seconds": time.time() - started})
    events.emit("split", **{key: found[key] for key in ("format", "rows", "train", "eval", "rejected")})
    return {"run_uri": run.uri, **found}


def with_changes(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """Returns the recipe with values from the pipeline's parameters, checked like any recipe."""
    document = recipe.model_dump(mode="json")
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        (document[section] if section else document)[key] = value
    return recipe_file.validate(document, origin="pipeline parameters")


def _write_sides(recipe: Recipe, folder: str) -> dict[str, Any]:
    rows = readers.read([source.uri for source in recipe.data.sources], recipe.data.sample_by)
    head = _head(rows)
    columns = sorted({column for row in head if isinstance(row, Row) for column in row.values})
    row_format = formats.detect(recipe, columns) if columns else "text"
    settings = recipe.data.model_dump(
        exclude={"source", "max_length", "packing", "max_rejected", "assistant_only_loss"}
    )
    digest = hashlib.sha256(json.dumps([recipe.seed, row_format, settings], sort_keys=True).encode())
    counts = {"train": 0, "eval": 0}
    rejected: list[Rejected] = []
    with open(f"{folder}/train.jsonl", "wb") as train, open(f"{folder}/eval.jsonl", "wb") as held_out:
        for row in islice(_normalised(chain(head, rows), recipe, row_format, rejected), recipe.data.max_samples):
            line = json.dumps(row, sort_keys=True, ensure_ascii=False).encode()
            side = "eval" if is_eval(line, recipe.seed, recipe.data.split.eval) else "train"
            digest.update(hashlib.sha256(line).digest())
            (held_out if side == "eval" else train).write(line + b"\n")
            counts[side] += 1
    return {
        "digest": digest.hexdigest(),
        "source": ", ".join(source.uri for source in recipe.data.sources),
        "format": row_format,
        "rows": sum(counts.values()),
        **counts,
        "rejected": len(rejected),
        "rejected_uri": None,
        "rejected_rows": rejected,
    }


def _head(rows: Iterator[Row | Rejected]) -> list[Row | Rejected]:
    """Takes the first usable rows and what is broken before and between them."""
    head: list[Row | Rejected] = []
    usable = 0
    for row in rows:
        head.append(row)
        usable += isinstance(row, Row)
        if usable == LOOKED_AT:
            break
    return head


def is_eval(line: bytes, seed: int, eval_fraction: float) -> bool:
    """Tells a row's side from its content and the seed alone, so that growth never moves a row."""
    drawn = hashlib.sha256(b"%d:" % seed + line).digest()
    return int.from_bytes(drawn[:8], "big") < eval_fraction * 2**64


def _normalised(
    rows: Iterator[Row | Rejected], recipe: Recipe, row_format: str, rejected: list[Rejected]
) -> Iterator[dict[str, Any]]:
    shape: dict[str, type] | None = None
    for row in rows:
        if isinstance(row, Rejected):
            rejected.append(row)
            continue
        normal = formats.normalise(row.values, recipe.data, row_format)
        if not isinstance(normal, str):
            found = {name: type(value) for name, value in normal.items()}
            shape = shape or found
            normal = normal if found == shape else _unlike(shape, found)
        if isinstance(normal, str):
            raw = json.dumps(row.values, ensure_ascii=True, default=str)
            rejected.append(Rejected(row.file, row.line, normal, raw))
        else:
            yield normal


def _unlike(shape: dict[str, type], found: dict[str, type]) -> str:
    """Returns why a row does not go with the rows before it."""
    for name in sorted(shape.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing, the rows before have it"
        if name not in shape:
            return f"{name} is given, the rows before have none"
    name = next(name for name in shape if shape[name] is not found[name])
    kinds: dict[type, str] = {list: "a conversation", str: "a text"}
    return f"{name} is {kinds.get(found[name], found[name].__name__)}, in the rows before it is not"


def _check(recipe: Recipe, found: dict[str, Any], rejected: list[Rejected]) -> None:
    total = found["rows"] + len(rejected)
    kept = f"They are kept with their reasons in {found['rejected_uri']}." if rejected else ""
    if rejected:
        first = rejected[0]
        example = f"the first is {os.path.basename(first.file)} line {first.line}: {first.reason}"
        events.emit("rejected", count=len(rejected), of=total, first=example, uri=found["rejected_uri"])
        if len(rejected) > recipe.data.max_rejected * total:
            raise UserError(
                f"{len(rejected)} of {total} rows are unusable, above data.max_rejected "
                f"{recipe.data.max_rejected:g}; {example}. {kept}",
                remedy="Mend the data or raise data.max_rejected.",
            )
    if found["rows"] == 0:
        raise UserError(f"data.source {found['source']!r} holds no rows.", remedy="Check the path and data.columns.")
    for side in ("train", "eval"):
        if found[side] == 0:
            raise UserError(
                f"data.split.eval {recipe.data.split.eval:g} leaves no {side} rows of {found['rows']}.",
                remedy="Change the fraction or give more rows.",
            )
