"""Assigns rows to sides, and chooses how often each is used, by content and seed alone: so a source may grow."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel

from baton.data.rows import SIDES, Record, Spool
from baton.documents import Document
from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.store.storage import Storage

ALL = 2**64  # positions are below this
MAX_STRATA = 1000  # values of `data.split.stratify_by`; more are no strata

MAX_POSITIONS = 4_000_000
"""Positions held at once, 32 MB. Of more rows each side gets its share to within a fraction of a percent by itself."""

SIDE_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("eval", "evaluation", "validation", "valid", "val", "dev"), "eval"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Name of a side in sources → the side."""

Cut = tuple[int, int]  # positions below which rows are held out for evaluation, and from which on for the test


class Shares(BaseModel):
    """Parts of the rows that are held out, from 0 to 1."""

    eval: float
    test: float


class PinnedThresholds(Document):
    """The shares, and the cuts of each stratum that met them."""

    shares: Shares
    cuts: dict[str, Cut]


def position(seed: int, key: str) -> int:
    """Returns a number in [0, 2^64) that the key and the seed alone decide, evenly spread."""
    return int.from_bytes(hashlib.sha256(b"%d:" % seed + key.encode()).digest()[:8], "big")


class SplitAssigner:
    """The rule of `data.split`.

    A row's position decides: the lowest are held out for evaluation, the highest for the test, so that changing one
    share moves no row of the other. The position is that of its content, or with `group_by` of its group. Rows of one
    group, and rows with the same content, stay together, so counts are met to within one group.

    Shares alone need nothing else. For counts and strata, the first rows under the recipe's name set the
    cuts, which are pinned by put-if-absent: no row moves as the data grows. A count is met exactly where there are no
    strata; each stratum has its share to within one row (drawn by its name, so that the whole has its share, too). Of
    later rows, and beyond `MAX_POSITIONS`, each side gets its share in expectation.
    """

    def __init__(self, recipe: Recipe, storage: Storage) -> None:
        self._split, self._seed, self._storage = recipe.data.split, recipe.seed, storage
        self._sizes = {"eval": self._split.eval, "test": self._split.test}
        counted = any(size >= 1 for size in self._sizes.values())
        # Whether all rows decide, so that `fit` must see them first.
        self.needs_all = self._split.column is None and (counted or self._split.stratify_by is not None)
        self._plain = (0, ALL) if counted else _plain(self._sizes)
        self._cuts: dict[str, Cut] = {}
        settings = [recipe.seed, self._split.model_dump(), recipe.data.max_samples, recipe.data.shuffle]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = f"splits/{recipe.name}-{digest}"
        self.pinned: str | None = None  # address of the pinned cuts

    def side(self, record: Record) -> str:
        if record.side:
            return record.side
        stratum, at = self._place(record)
        below, above = self._cuts.get(stratum, self._plain)
        return "eval" if at < below else "test" if at >= above else "train"

    def assign(self, rows: Spool) -> np.ndarray[Any, Any]:
        """Returns the side of each row, by its index in `SIDES`."""

        if self.needs_all:
            self.fit(rows)
        return np.fromiter((SIDES.index(self.side(record)) for record in rows), np.uint8, len(rows))

    def fit(self, records: Iterable[Record]) -> None:
        """Sets the cuts by all rows, or takes the pinned ones.

        Raises:
            UserError: too many strata, or no rows left to train on.
            DamagedError: the pinned document is not one that a split wrote.
        """
        positions, count = self._gather(records)
        generation = 0
        while count:
            path = f"{self._folder}/{generation}.json"
            if not self._storage.exists(path):
                missing = {stratum: positions[stratum] for stratum in sorted(positions.keys() - self._cuts.keys())}
                # All strata have cuts. New strata of later data get a document of their own: pinned ones never change.
                if generation and not missing:
                    break
                shares = {side: size if size < 1 else size / count for side, size in self._sizes.items()}
                if sum(shares.values()) >= 1:
                    held_out = " and ".join(f"data.split.{side} {size:g}" for side, size in self._sizes.items() if size)
                    raise UserError(
                        f"{held_out} of {count} rows: none remain to train on.",
                        remedy="Hold out fewer, or give more rows.",
                    )
                cuts = {stratum: self._cut(stratum, positions, shares) for stratum, positions in missing.items()}
                made = {"rows": count, "shares": shares, "cuts": cuts}
                # Two splits at once may see different rows: one of them decides, for both.
                self._storage.create(path, json.dumps(made, indent=1, sort_keys=True).encode())
            # The first writer's.
            pin = PinnedThresholds.read(self._storage.read(path), self._storage.uri(path))
            self._sizes = pin.shares.model_dump()
            self._plain = _plain(self._sizes)
            self._cuts |= pin.cuts
            self.pinned = self._storage.uri(self._folder)
            generation += 1

    def _gather(self, records: Iterable[Record]) -> tuple[dict[str, array[int]], int]:
        """Returns the positions in each stratum, none at all where they are too many, and the number of rows."""
        gathered: dict[str, array[int]] = {}
        count = 0
        for record in records:
            if record.side:
                continue
            stratum, at = self._place(record)
            positions = gathered.setdefault(stratum, array("Q"))
            if count < MAX_POSITIONS:
                positions.append(at)
            count += 1
            if len(gathered) > MAX_STRATA:
                raise UserError(
                    f"data.split.stratify_by: {self._split.stratify_by!r} has more than {MAX_STRATA} values.",
                    remedy="Name a column with few, or use data.split.group_by to keep rows of one value together.",
                )
        return {name: array("Q") if count > MAX_POSITIONS else each for name, each in gathered.items()}, count

    def _cut(self, stratum: str, positions: array[int], shares: dict[str, float]) -> Cut:
        """Returns the cuts nearest to the shares that hold out as many rows as the shares ask for."""

        if not positions:
            return _plain(shares)
        ordered = np.sort(np.frombuffer(positions, dtype=np.uint64))
        held_out = {}
        for side, share in shares.items():
            drawn = position(self._seed, f"{side}:{stratum}") / ALL if self._split.stratify_by else 0.5
            held_out[side] = int(share * len(ordered) + drawn)
        below, above = _plain(shares)
        of_test = min(held_out["test"], len(ordered) - held_out["eval"])
        return _between(ordered, held_out["eval"], below), _between(ordered, len(ordered) - of_test, above)

    def _place(self, record: Record) -> tuple[str, int]:
        """Returns a record's stratum and its position in it."""
        if self._split.stratify_by:
            return record.key, position(self._seed, record.content)
        return "", position(self._seed, f"group:{record.key}" if self._split.group_by else record.content)


def _plain(shares: dict[str, float]) -> Cut:
    return int(shares["eval"] * ALL), ALL - int(shares["test"] * ALL)


def _between(ordered: np.ndarray[Any, Any], count: int, wanted: int) -> int:
    """Returns the cut nearest to `wanted` with `count` positions below it, or fewer where some are equal."""
    low = int(ordered[count - 1]) + 1 if count else 0
    high = int(ordered[count]) if count < len(ordered) else ALL
    return min(max(low, wanted), high)


def smallest_draws(rows: Spool, seed: int, count: int) -> Iterator[Record]:
    """Yields the `count` rows with the smallest drawn numbers, in their order; memory holds `count` numbers.

    The choice does not depend on the order; more rows push some out, and move none.
    """

    def drawn(record: Record) -> int:
        return position(seed, f"sample:{record.content}")

    smallest = heapq.nsmallest(count, map(drawn, rows))
    if not smallest:
        return
    last = smallest[-1]
    level = smallest.count(last)  # rows with the same content, which may be omitted in part
    for record in rows:
        number = drawn(record)
        if number == last:
            level -= 1
        if number < last or (number == last and level >= 0):
            yield record


def times_used(content: str, seed: int, weight: float) -> int:
    """Returns how often a training row is used in one pass: the fraction of a weight is the chance of one use more."""
    whole = math.floor(weight)
    return whole + (position(seed, f"weight:{content}") < (weight - whole) * ALL)
