"""Where rows of tokens come from: back through joining and dropping to lines of the split, and from there to files."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.models import packing, trained
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs import origins
from baton.components.shared.runs.documents.data import SplitCounts, TokensMeta
from baton.components.shared.runs.documents.rows import Place
from baton.components.shared.runs.run import Run
from baton.components.shared.store.bundles import Manifest


def of_rows(run: Run, recipe: Recipe, rows: Sequence[int]) -> list[Place]:
    """Returns where rows to train on come from.

    Args:
        run: The run.
        recipe: Its recipe.
        rows: Their numbers among the tokens, from 0; of packed ones those of their sequences.

    Returns:
        Files and lines of the source, in their order; where an older Baton made the tokens, maybe files and rows of
        these.

    Raises:
        BatonError: tokens or split are gone.
    """
    prefix, manifest = trained.tokens_manifest(run)
    meta = TokensMeta.read(manifest.meta, run.storage.uri(prefix))
    files = meta.files["train"]
    starts = [0, *accumulate(count for _, count in files)]
    by_file: dict[int, list[int]] = {}
    for row in rows:
        number = bisect_right(starts, row) - 1
        by_file.setdefault(number, []).append(row - starts[number])
    if not meta.first_lines and (packing.packs(recipe.data, "train") or meta.train != run.need(SplitCounts).train):
        names = ((run.storage.uri(manifest.path(prefix, files[number][0])), by_file[number]) for number in by_file)
        return [Place(file=name, line=row + 1) for name, within in names for row in within]
    first_lines = meta.first_lines or [start + 1 for start in starts]
    lines: set[int] = set()
    for number, within in by_file.items():
        noted = _noted(run, prefix, manifest, files[number][0])
        lines.update(_lines(noted, recipe, within) if noted else (first_lines[number] + row for row in within))
    return origins.places(run, lines)


def _noted(run: Run, prefix: str, manifest: Manifest, name: str) -> list[tuple[int, int]] | None:
    """Returns line and length of each row of a file before they were joined; None where each row is the next line's."""
    import numpy as np

    side, _, file = name.partition("/")
    noted = f"lines/{side}-{file.rpartition('.')[0]}.npy"
    if noted not in manifest.files:
        return None
    with scratch_folder("lines") as scratch:
        local = os.path.join(scratch, "lines.npy")
        run.storage.download(manifest.path(prefix, noted), local)
        return [(int(line), int(length)) for line, length in np.load(local)]


def _lines(noted: Sequence[tuple[int, int]], recipe: Recipe, rows: Iterable[int]) -> list[int]:
    """Returns the lines of rows of a file."""
    if not packing.packs(recipe.data, "train"):
        return [noted[row][0] for row in rows]
    import pyarrow as pa

    # Joined as they were, each token standing for the line that it is of.
    kind = pa.list_(pa.int64())
    table = pa.table({"input_ids": pa.array(([line] * length for line, length in noted), type=kind)})
    joined = packing.packed(table, recipe.data, is_all=True)["input_ids"]
    return [line for row in rows for line in joined[row].as_py()]
