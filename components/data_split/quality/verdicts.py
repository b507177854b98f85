"""Writes an inspection's results with the run, and ends the run where a check asks for it."""

from __future__ import annotations

import json
import os
from itertools import islice
from typing import Any

from baton.components.data_split.quality.inspection import Inspection
from baton.components.data_split.quality.ledger import NUM_EXAMPLES
from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.pages import quality_checks, quality_page
from baton.components.shared.pages.quality_checks import FINDINGS, QUALITY, Verdict
from baton.components.shared.runs.run import Run


def keep(run: Run, inspection: Inspection, split: dict[str, Any], rejected_path: str) -> str:
    """Writes `quality.json`, `quality.jsonl` and the page of a run.

    Args:
        run: The run.
        inspection: All rows were resolved in it.
        split: Counts `train`, `eval`, `test` and `rejected`, the counts of its `sources`, and `rejected_uri`.
        rejected_path: File of the rejected rows.

    Returns:
        The page.

    Raises:
        UserError: a check that is to fail found something; it is written all the same.
    """
    path, num_findings = inspection.ledger
    where = run.storage.uri(run.path(FINDINGS))
    if num_findings:
        run.storage.upload(path, run.path(FINDINGS))
    counts = {name: split[name] for name in ("train", "eval", "test", "rejected")}
    num_read = sum(source["rows"] + source["rejected"] for source in split["sources"])
    with open(rejected_path, encoding="ascii") as file:
        first_rejected = [json.loads(line) for line in islice(file, NUM_EXAMPLES)]
    summary = inspection.summary(counts, first_rejected, num_read)
    places = {"findings_uri": where if num_findings else None, "rejected_uri": split["rejected_uri"]}
    run.put(QUALITY, {**summary, **places, "sources": [became(source) for source in split["sources"]]})
    page = quality_page.write(run)
    quality = quality_checks.collect(run)
    events.emit(
        events.Quality(state=quality["state"], sentence=quality["sentence"], page=run.uri + f"/{quality_checks.PAGE}")
    )
    require(summary, where)
    return page


def became(source: dict[str, Any]) -> str:
    """Returns in one line which columns of a source became what."""
    told = events.Source.read({"unused": None, **source})
    return f"{told.uri} holds {told.in_words}"


def require(summary: dict[str, Any], where: str) -> None:
    """Ends the run if a check that may end it found something.

    Args:
        summary: What `Inspection.summary` returned.
        where: Address of the file with all findings.

    Raises:
        UserError: it names each such check, how much it found, the first example and where all are.
    """
    failed = {
        name: check
        for name, check in summary["checks"].items()
        if check["verdict"] == "failed" and name != "rejected"  # of which the split says more
    }
    if not failed:
        return
    place = f" All are in {where}." if set(failed) - {"few_rows"} else ""
    settings = " and ".join(f"data.quality.{name}" for name in failed)
    raise UserError(
        f"{'; '.join(_told(name, check) for name, check in failed.items())}.{place}",
        remedy=f"Mend the data, or set {settings} to warn or fix.",
    )


def _told(name: str, check: Verdict) -> str:
    if name == "few_rows":
        return f"data.quality.few_rows: {check['rows']} training rows, at least {check['of']} are expected"
    first = check["examples"][0]
    return (
        f"data.quality.{name}: found in {check['rows']} of {check['of']} rows; "
        f"the first is {os.path.basename(first['file'])} line {first['line']}: {first['reason']}"
    )
