"""What a chunk needs of the tokens, out of much and out of little."""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow as pa

from baton.recipe import load
from baton.runs.plan import make_plan
from baton.runs.run import Run
from baton.store import bundle
from baton.store.bundle import BundleWriter
from baton.store.storage import Storage
from benchmarks.bench import Bench, parse_mark
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import watch
from benchmarks.table import Row, faster, keep, share
from benchmarks.theirs import Theirs

NAME = "slice"
TITLE = "a chunk's tokens from their manifest to the first batch"
LENGTH, ROWS = 512, 8192
"""Tokens of a row and rows of a file: 34 MB, as the tokenize stage writes them."""
LITTLE, MUCH = 8, 320
"""Files of the two sets: one group's, and those of 11 GB."""
STEPS, BATCH = 100, 8


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    much = MUCH // 10 if bench.options.quick else MUCH
    little_run = _run(f"{bench.work}/little", LITTLE, "blocks")
    runs = {"much": _run(f"{bench.work}/much", much, "blocks"), "all": _run(f"{bench.work}/all", much, "uniform")}
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds():
        for name, run in {"little": little_run, **runs}.items():
            keep(columns, {name: _opened(run)})
    size = ROWS * LENGTH * 8
    return Row(
        title=TITLE,
        conditions=f"{STEPS} steps of {BATCH} rows out of {much * size / 1e9:.1f} GB in {much:,} files, in a folder",
        preparation="neither side",
        figures=[
            share(
                "slice", columns["much"], columns["little"], f"of {LITTLE * size / 1e6:.0f} MB", unit="s", at_most=1.25
            ),
            faster("the same, beside all files", columns["much"], columns["all"], "order: uniform", at_least=10),
        ],
        notes=[
            "the files are links to one file, which is in memory: each is read and its hash taken all the same",
            "the slice has as many files in both sets",
        ],
    )


def _opened(run: Run) -> float:
    trace = watch(["-m", "benchmarks.slicing", run.uri, str(STEPS)], parse_mark, environment=ENVIRONMENT)
    return float(trace.all("opened")[0]["seconds"])


def _run(store: str, num_files: int, order: str) -> Run:
    """Returns a run whose tokens are many links to one file."""
    recipe = load.validate(
        {
            "name": "slice",
            "store": store,
            "model": {"base": "org/model"},
            "data": {"source": "rows.jsonl", "order": order, "max_length": LENGTH},
            "training": {"batch_size": BATCH},
            "tracking": {"mlflow": None},
        },
        origin=NAME,
    )
    run = Run(Storage(store), "bench")
    run.create(recipe)
    writer = BundleWriter(run.storage, "data/bench/tokens", kind="tokens")
    folder = f"{store}/data/bench/tokens/{writer.folder}/train"
    os.makedirs(folder)
    _write(f"{folder}/0.arrow")
    names = [f"{number}.arrow" for number in range(num_files)]
    for name in names[1:]:
        os.link(f"{folder}/0.arrow", f"{folder}/{name}")
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_format_columns": None}
    state |= {"_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None}
    for name, document in (("state.json", state), ("dataset_info.json", {})):
        with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
            json.dump(document, file)
    digest = bundle.file_sha256(f"{folder}/0.arrow")
    for name in os.listdir(folder):
        own = digest if name.endswith(".arrow") else bundle.file_sha256(f"{folder}/{name}")
        writer.files[f"train/{name}"] = {"size": os.path.getsize(f"{folder}/{name}"), "sha256": own}
    writer.commit({"files": {"train": [[f"train/{name}", ROWS] for name in names]}})
    run.set_once("plan.json", make_plan(recipe, ROWS * num_files).to_json())
    run.put("tokens.json", {"prefix": "data/bench/tokens", "order": order})
    return run


def _write(path: str) -> None:
    ids = np.random.default_rng(0).integers(0, 32000, ROWS * LENGTH, dtype=np.int32)
    offsets = np.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=np.int32)
    column = pa.ListArray.from_arrays(offsets, ids)
    table = pa.table({"input_ids": column, "labels": column})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
