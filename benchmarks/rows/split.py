"""Rows to sides."""

from __future__ import annotations

import json
import os
import shutil

from baton.recipe.data import QualityChecks
from benchmarks.bench import Bench, parse_mark
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import Event, watch
from benchmarks.rows.tokenize import write_rows
from benchmarks.table import Figure, Row, keep, share
from benchmarks.theirs import Theirs

NAME = "split"
TITLE = "rows of a file to the sides of a split, and the memory that it takes"
ROWS = 100_000
CHECKS = [name for name, field in QualityChecks.model_fields.items() if field.default in ("warn", "fix")]


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    work = f"{bench.work}/split"
    os.makedirs(work)
    count = ROWS // (50 if bench.options.quick else 1)
    write_rows(f"{work}/pairs.jsonl", count, None)
    rows = f"{work}/rows.jsonl"
    with open(f"{work}/pairs.jsonl", encoding="utf-8") as pairs, open(rows, "w", encoding="utf-8") as file:
        for row in map(json.loads, pairs):
            file.write(json.dumps({"question": row["prompt"].strip(), "answer": row["completion"]}) + "\n")
    columns: dict[str, list[float]] = {}
    for number in bench.rounds():
        for side, quality in (("plain", dict.fromkeys(CHECKS, "off")), ("checked", {})):
            store = f"{work}/{side}-{number}"
            found = _timed("split", json.dumps(_recipe(store, rows, quality)))
            assert found["tokens"] == count, "every row"
            keep(columns, {side: count / found["seconds"] / 1e3, f"{side} peak": found["peak"] / 1e6})
            shutil.rmtree(store)
        found = _timed("map", rows, f"{work}/mapped-{number}")
        assert found["tokens"] == count, "every row"
        keep(columns, {"mapped": count / found["seconds"] / 1e3, "mapped peak": found["peak"] / 1e6})
        shutil.rmtree(f"{work}/mapped-{number}")
    map_name = "datasets.map"
    return Row(
        title=TITLE,
        conditions=f"{count:,} questions and answers of docstrings in JSON lines; a tenth is held out by content",
        preparation="both sides",
        figures=[
            share("speed without checks", columns["plain"], columns["mapped"], map_name, unit="1000 rows/s"),
            share("memory without checks", columns["plain peak"], columns["mapped peak"], map_name, unit="MB"),
            Figure(what="speed with all checks", unit="1000 rows/s", ours=columns["checked"]),
            Figure(what="memory with all checks", unit="MB", ours=columns["checked peak"]),
        ],
        notes=[
            "ours is the whole stage, from the file to the committed split; the other side loads the rows with "
            "`load_dataset`, normalises them with `map`, divides them with `filter` and writes both; one process each",
            "memory: RSS of all processes together, torch's import included on both sides",
        ],
    )


def _recipe(store: str, rows: str, quality: dict[str, str]) -> dict[str, object]:
    return {
        "name": NAME,
        "store": store,
        "model": {"base": "org/model"},
        "data": {"source": rows, "quality": quality},
        "tracking": {"mlflow": None},
    }


def _timed(*arguments: str) -> Event:
    return watch(["-m", "benchmarks.tokenizing", *arguments], parse_mark, environment=ENVIRONMENT).all("tokenized")[0]
