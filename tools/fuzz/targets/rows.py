"""The bytes of a source through its reader and through what data split does with a row, to rows on a side or rejected.

An input is four bytes, which choose the name of the file, how it is packed, what a sample of text is and the recipe;
then the content. Rows may be 4 KiB long instead of 64 MiB, so that inputs of a few KiB come to the end of all buffers.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet

from baton.data import readers
from baton.data.rows import UnusableRow
from baton.data.split import write_splits
from baton.errors import UserError
from baton.pages import html
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.data import test_readers_fuzz as small
from tests.data.test_public_shapes import SHAPES
from tools.fuzz import trees
from tools.fuzz.target import Mutate, Target, require_message, scratch

MAX_ROW, BLOCK = 2**12, 2**8
readers.MAX_ROW, readers.BLOCK = MAX_ROW, BLOCK
csv.field_size_limit(MAX_ROW)
# The page's template is compiled once, and not for each input.
html.environment = functools.cache(html.environment)

ACTIONS = ("empty", "duplicates", "near_duplicates", "leakage", "encoding", "control_characters", "turns", "secrets")
RECIPES: tuple[dict[str, Any], ...] = (
    {"training": {"method": "sft"}},
    {"training": {"method": "sft"}, "data": {"quality": dict.fromkeys((*ACTIONS, "emails"), "fix")}},
    {"training": {"method": "sft"}, "data": {"render_as": "chat", "reasoning": "drop"}},
    {"training": {"method": "sft"}, "data": {"columns": {"prompt": ["a", "b.c"], "completion": "b.0"}}},
    {"training": {"method": "sft"}, "data": {"split": {"column": "split"}}},
    {"training": {"method": "sft"}, "data": {"split": {"group_by": "a.b"}}},
    {"training": {"method": "sft"}, "data": {"split": {"stratify_by": "a"}, "extra_columns": ["id"]}},
    {"training": {"method": "sft"}, "data": {"max_samples": 3, "shuffle": True, "quality": {"languages": ["en"]}}},
    {"training": {"method": "pretrain"}},
    {"training": {"method": "dpo"}},
    {"training": {"method": "kto"}},
    {"training": {"method": "reward"}},
    {"training": {"method": "grpo", "grpo": {"rewards": ["exact"]}}},
)
SAMPLES = ("line", "paragraph", "document")
PACKINGS = tuple(small.PACKED)
PACKED_AS_NAMED, NOT_AS_NAMED = len(PACKINGS), 2 * len(PACKINGS)
"""Packings below the first are what the name says; below the second the content is as it stands, whatever the name."""


@functools.cache
def _recipe(source: str, number: int, sample_by: str) -> Recipe:
    recipe = RECIPES[number]
    data = {"source": source, "sample_by": sample_by, "max_rejected": 1, **recipe.get("data", {})}
    whole = {"name": "a", "model": {"base": "org/model"}, "tracking": {"mlflow": None}, **recipe, "data": data}
    return load.validate(whole, origin="recipe.yaml")


def run(data: bytes) -> None:
    """Reads a source; each row is on a side, rejected with file, line and reason, or dropped by a check."""
    logging.disable()
    suffix, packing, sample, recipe = data[:4].ljust(4, b"\0")
    content, packing = data[4:], packing % NOT_AS_NAMED
    packed = PACKINGS[packing % len(PACKINGS)]
    path = scratch() / f"rows.{small.SUFFIXES[suffix % len(small.SUFFIXES)]}{packed}"
    path.write_bytes(small.PACKED[packed](content) if packing < PACKED_AS_NAMED else content)
    sample_by = SAMPLES[sample % len(SAMPLES)]
    try:
        read = _read(path, sample_by)
        _split(_recipe(str(path), recipe % len(RECIPES), sample_by), read)
    except UserError as error:
        require_message(error)
    finally:
        path.unlink()


def _read(path: Path, sample_by: str) -> int:
    """Reads a file, and returns how many rows it has, those that are rejected among them."""
    last, count = 0, 0
    for found in readers.read(str(path), sample_by):
        assert found.file == str(path)
        assert found.line >= 1
        # The lines of a record that is broken are rejected each, and so may come after the next record's first.
        assert found.line >= last or isinstance(found, UnusableRow), f"line {found.line} after line {last}"
        last, count = found.line, count + 1
        if isinstance(found, UnusableRow):
            assert found.reason
            json.dumps([found.reason, found.raw])
        else:
            assert isinstance(found.values, dict)
    return count


def _split(recipe: Recipe, read: int) -> None:
    folder = scratch() / "split"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = Run(Storage(str(folder / "store")), "a")
    run.create(recipe)
    split = write_splits(recipe, run, str(folder))
    counts = split.counts
    dropped = run.require("quality.json")["rows"]["dropped"]
    weighed = sum(counts[side] for side in ("train", "eval", "test"))
    assert weighed == counts["rows"]
    if recipe.data.max_samples is None:
        told = counts["rows"] + counts["rejected"] + dropped
        assert told == read, f"{read} rows were read, and {told} are told of"


def _lines(rows: list[Any], **options: Any) -> bytes:
    return "\n".join(trees.dumps(row, **options) for row in rows).encode("utf-8", "surrogatepass")


def _table(rows: list[Any], kind: str, rng: Random) -> bytes:
    table = pyarrow.Table.from_pylist(rows)
    sink = io.BytesIO()
    if kind == "parquet":
        codec = rng.choice(("none", "snappy", "gzip", "brotli", "lz4", "zstd"))
        options = {"use_dictionary": rng.random() < 0.5, "data_page_version": rng.choice(("1.0", "2.0"))}
        pyarrow.parquet.write_table(table, sink, row_group_size=rng.randrange(1, 9), compression=codec, **options)
        return sink.getvalue()
    options = pyarrow.ipc.IpcWriteOptions(compression=rng.choice((None, "lz4", "zstd")))
    opened = pyarrow.ipc.new_file if rng.random() < 0.5 else pyarrow.ipc.new_stream
    with opened(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.randrange(1, 9))
    return sink.getvalue()


def seeds() -> Iterator[bytes]:
    """Yields rows as public data sets have them, in each type of file."""
    methods = {recipe["training"]["method"]: number for number, recipe in reversed([*enumerate(RECIPES)])}
    for shape in SHAPES:
        head = bytes([0, 0, 0, methods.get(shape["method"], 0)])
        yield head + _lines([shape["row"]] * 2)
    rows = [{"prompt": f"Question {at}?", "completion": f"Answer {at}.", "split": "train"} for at in range(12)]
    csv_rows = b"prompt,completion,split\n" + b"".join(b'"a, %d",b,eval\n' % at for at in range(9))
    contents = {
        "jsonl": _lines(rows),
        "json": json.dumps(rows, indent=1).encode(),
        "csv": csv_rows,
        "tsv": csv_rows.replace(b",", b"\t"),
        "parquet": _table(rows, "parquet", Random(1)),
        "arrow": _table(rows, "arrow", Random(1)),
        "txt": b"One line.\nAnother.\n\nA paragraph.\n" * 4,
    }
    for number, suffix in enumerate(small.SUFFIXES):
        for packing in range(NOT_AS_NAMED):
            yield bytes([number, packing, number % 3, 8 if suffix == "txt" else 0]) + contents[suffix]
        for kind, pack in enumerate(small.PACKED.values(), PACKED_AS_NAMED):
            yield bytes([number, kind, 0, 0]) + pack(contents[suffix])
        for recipe in range(len(RECIPES)):
            yield bytes([number, 0, 2, recipe]) + contents[suffix]
    yield from (bytes([number % 7, 0, 0, 0]) + bit for number, bit in enumerate(small.BITS))


def mutate(data: bytes, rng: Random, by_bytes: Mutate) -> bytes:
    """Changes a source in the values of its rows, in its text, in how often something comes, or in its name."""
    head, content = bytearray(data[:4].ljust(4, b"\0")), data[4:]
    suffix = small.SUFFIXES[head[0] % len(small.SUFFIXES)]
    match rng.randrange(10):
        case 0:
            head[rng.randrange(4)] = rng.randrange(256)
        case 1 | 2 | 3 | 4:
            content = _in_values(content, suffix, rng)
        case 5 | 6 | 7:
            content = _in_text(content, rng)
        case 8:
            content = _longer(content, rng)
        case _:
            content = by_bytes(content, len(content) + 64)
    return bytes(head) + content


def _in_values(content: bytes, suffix: str, rng: Random) -> bytes:
    rows = _rows(content, suffix)
    names = [*{name for row in rows for name in row}, *(name for shape in SHAPES for name in shape["row"])]
    shapes = [part for shape in SHAPES for part in (shape["row"], *shape["row"].values())]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(rows))
        rows[at] = trees.mutate(rows[at], rng, lambda: rng.choice((*trees.VALUES, rng.choice(shapes))), names)
    if rng.random() < 0.2:
        rows.append(rng.choice(SHAPES)["row"])
    match suffix:
        case "parquet" | "arrow":
            return _table(rows, suffix, rng)
        case "json":
            return trees.dumps(rows, indent=rng.choice((None, 1))).encode("utf-8", "surrogatepass")
        case _:
            return _lines(rows, ensure_ascii=rng.random() < 0.5)


def _rows(content: bytes, suffix: str) -> list[Any]:
    if suffix == "parquet":
        return list(pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist())
    if suffix == "arrow":
        opened = pyarrow.ipc.open_file if content.startswith(b"ARROW1") else pyarrow.ipc.open_stream
        return list(opened(content).read_all().to_pylist())
    if suffix == "json":
        return list(json.loads(content))
    return [json.loads(line) for line in content.split(b"\n") if line.strip()]


def _in_text(content: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    cut = rng.choice((0, 0, 1, 4, len(content)))
    return content[:at] + rng.choice(small.BITS) + content[at + cut :]


def _longer(content: bytes, rng: Random) -> bytes:
    """Repeats a part, until it is longer than a buffer or than a row may be."""
    start = rng.randrange(len(content) + 1)
    part = content[start : start + rng.choice((1, 2, 10, 100))] or b"x"
    size = rng.choice((BLOCK - 1, BLOCK, BLOCK + 1, MAX_ROW - 1, MAX_ROW, MAX_ROW + 1, 2 * MAX_ROW))
    return content[:start] + (part * (size // len(part) + 1))[:size] + content[start:]


TARGET = Target(run=run, seeds=seeds, mutate=mutate, longest=2**13)
