"""Replay: of the rows that a model has learnt already, a share is trained on again beside the new ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.components.data_split.records import Record, Spool
from baton.components.data_split.sides import position
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.store import bundles
from baton.components.shared.store.storage import Storage

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.uint64]]

Placed = Iterator[tuple[Record, str]]
"""Records, each with its side."""


def replayed(placed: Placed, recipe: Recipe, storage: Storage, scratch: str) -> Placed:
    """Yields the records on which a model that has learnt `retrain.learnt` trains on.

    Those that are held out stay as they are. Of those to train on, the new ones, and so many of the others that they
    make up `retrain.replay` of the whole, as far as there are enough: those whose drawn numbers are smallest. The draw
    is by content and by what was learnt last, so that each retraining replays others. Rows that were learnt and are
    not in the source any more are not replayed.

    Args:
        placed: All records.
        recipe: Says what was learnt and the share.
        storage: The store, which has the data of that.
        scratch: Folder for files.

    Raises:
        UserError: nothing is new, or the data of what was learnt is gone.
    """
    learnt = _learnt(storage, recipe.retrain.learnt, scratch)
    # Gone through twice: the largest number that is drawn is known only after the last row.
    spool = Spool((replace(record, side=side) for record, side in placed), f"{scratch}/replay.jsonl")
    key = f"replay:{recipe.retrain.learnt[-1]}"
    drawn, num_new = [], 0
    for record in spool:
        if record.side != "train":
            continue
        if _is_in(learnt, record):
            drawn.append(position(recipe.seed, f"{key}:{record.content}"))
        else:
            num_new += 1
    if not num_new:
        raise UserError(
            "data.source holds no training row that the accepted model has not learnt; rows can have been removed.",
            remedy="Set retrain.start to base, to train without the rows that are gone.",
        )
    share = recipe.retrain.replay
    count = min(round(num_new * share / (1 - share)), len(drawn))
    # Below every number: none is drawn.
    last = sorted(drawn)[count - 1] if count else -1
    for record in spool:
        is_old = record.side == "train" and _is_in(learnt, record)
        if not is_old or position(recipe.seed, f"{key}:{record.content}") <= last:
            yield record, record.side


def _learnt(storage: Storage, digests: list[str], scratch: str) -> Numbers:
    """Returns a number for each row of the data that was learnt, ascending: eight bytes a row."""
    import numpy as np

    parts = [np.empty(0, dtype=np.uint64)]
    for place, digest in enumerate(digests):
        prefix = f"data/{digest}/split"
        manifest = bundles.usable_manifest(storage, prefix)
        if manifest is None:
            raise UserError(
                f"{storage.uri(prefix)} is gone, and with it what the accepted model has learnt.",
                remedy="Set retrain.start to base: the next retraining then starts from the recipe's own model.",
            )
        folder = bundles.fetch(storage, prefix, manifest, f"{scratch}/learnt-{place}", names=["train.jsonl"])
        with open(os.path.join(folder, "train.jsonl"), encoding="utf-8") as file:
            parts.append(np.fromiter((_number(line.rstrip("\n")) for line in file), dtype=np.uint64))
    return np.unique(np.concatenate(parts))


def _is_in(learnt: Numbers, record: Record) -> bool:
    number = learnt.dtype.type(_number(record.content))
    at = int(learnt.searchsorted(number))
    return at < len(learnt) and bool(learnt[at] == number)


def _number(content: str) -> int:
    return position(0, f"learnt:{content}")
