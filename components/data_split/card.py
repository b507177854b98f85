"""What data split leaves in Kubeflow: the first rows of each side, where all of them are, and where else the run is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any, BinaryIO

from baton.components.data_split.quality import verdicts
from baton.components.shared.pages import quality_checks, quality_page
from baton.components.shared.pages.cards import Card, table, visible
from baton.components.shared.runs import links
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.run import Run

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


def rows(run: Run, split: dict[str, Any], run_name: str) -> Card:
    """Returns the card of the rows.

    Args:
        run: The run.
        split: What `split_data` returned.
        run_name: The name by which the run is resumed: its own, without that of its phase.
    """
    recipe = run.recipe()
    url = links.mlflow_url(run, recipe)
    parts = [" · ".join(f"{name} {split[name]:,}" for name in COUNTS)]
    if recipe.tracking.cards == "rows":
        for side, lines in split["first"].items():
            if lines:
                numbered = (f"{number}  {visible(line, LONGEST)}" for number, line in enumerate(lines, 1))
                parts.append("\n".join([side, *numbered]))
    parts += [verdicts.became(source) for source in split["sources"]]
    places = {
        "rows": split["address"],
        "rejected": split["rejected_uri"],
        "run": run.uri,
        "MLflow": url,
        "report": f"{run.uri}/report.html, and at the stage report",
        "begun": run.need(RunHead).created,
        "resume": f"submit the same recipe with run_name {run_name}: it continues from the newest checkpoint",
    }
    facts = {name: split[name] for name in (*COUNTS, "rows", "digest", "address")}
    facts |= {"run": run.uri, "run_name": run_name, "mlflow": url}
    return Card("\n\n".join([*parts, table(places)]) + "\n", facts)


def quality(run: Run, page: str) -> str:
    """Returns the page about the rows as Kubeflow may have it: without what they say, where the recipe wants that."""
    if run.recipe().tracking.cards == "rows":
        return page
    return quality_page.render(quality_checks.without_examples(quality_checks.collect(run)))
