"""Data split: reads the source once, keeps what is broken, and puts each row on its side for good."""

from __future__ import annotations

import time
from typing import Any

from baton.components.data_split import card
from baton.components.data_split.placement import SIDES, Split, split_into
from baton.components.shared.core import events
from baton.components.shared.core.errors import FormatError
from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.pages import quality_page
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs import code, tracking
from baton.components.shared.runs.documents.data import RunHead, SplitCounts, SplitData
from baton.components.shared.runs.formats import FORMATS, release
from baton.components.shared.runs.mlflow import datasets
from baton.components.shared.runs.run import Run, check_name
from baton.components.shared.store import bundles
from baton.components.shared.store.storage import Storage


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
    code.ship(run, recipe.hooks.source, recipe.trust)
    tracking.start(run, recipe)
    is_older = run.need(RunHead).made.number("rows") != FORMATS["rows"].number
    with scratch_folder("split") as scratch:
        split = _kept(run, scratch) if is_older else split_into(recipe, run, scratch)
        columns = datasets.columns(card.whole_rows(f"{scratch}/sides", SIDES))
    counts = split.counts
    # After the rows are committed: once this is there, a run has its data, and never other ones.
    run.write_once(SplitData(digest=counts["digest"], rows=counts["rows"]))
    run.put(SplitCounts.NAME, {**counts, "columns": columns})
    tracking.log_data(run, recipe)
    run.record("data-split", {"seconds": time.time() - started})
    events.emit(events.Split(**{key: counts[key] for key in ("format", "rows", *SIDES, "rejected")}))
    return {"run_uri": run.uri, **counts, "page": split.page, "address": split.address, "first": split.first}


def _kept(run: Run, scratch: str) -> Split:
    """Returns the rows that a run of another release has, which it keeps: this one would make others.

    Raises:
        FormatError: it has none.
    """
    data = run.read(SplitData)
    manifest = bundles.usable_manifest(run.storage, data.prefix) if data else None
    if data is None or manifest is None:
        raise FormatError(
            f"run {run.name!r} was begun by another release, its rows are not there, and this Baton, {release()}, "
            "makes other ones.",
            remedy="Start the run under another name, or run its data split with the release that began it.",
        )
    folder = f"{scratch}/sides"
    names = [f"{side}.jsonl" for side in SIDES]
    bundles.fetch(run.storage, data.prefix, manifest, folder, names=names, in_place=False)
    counts = {**manifest.meta, **(run.get(SplitCounts.NAME) or {})}
    counts.pop("columns", None)
    address = run.storage.uri(manifest.path(data.prefix))
    return Split(counts, quality_page.write(run), address, card.first_rows(folder, SIDES))
