"""Chooses rows and how often each is used: `max_samples`, `shuffle` and weights, decided by content and seed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from baton.components.data_split.records import Record, Spool
from baton.components.data_split.sides import ALL, position


def smallest(spool: Spool, seed: int, count: int) -> Iterator[Record]:
    """Yields the rows whose drawn numbers are smallest, in the order in which they stand.

    Which rows these are does not depend on their order; more rows push some out, and move none. Memory holds `count`
    numbers.

    Args:
        spool: All rows.
        seed: The recipe's.
        count: How many.
    """
    heap: list[int] = []  # negative: the largest of the smallest is in front
    for record in spool:
        drawn = -_drawn(record, seed)
        if len(heap) < count:
            heapq.heappush(heap, drawn)
        elif drawn > heap[0]:
            heapq.heapreplace(heap, drawn)
    if not heap:
        return
    last = -heap[0]
    level = sum(-drawn == last for drawn in heap)  # rows with the same content, of which not all may be taken
    for record in spool:
        drawn = _drawn(record, seed)
        if drawn < last:
            yield record
        elif drawn == last and level:
            level -= 1
            yield record


def _drawn(record: Record, seed: int) -> int:
    return position(seed, f"sample:{record.content}")


def uses(content: str, seed: int, weight: float) -> int:
    """Returns how often a training row is used in one pass.

    Args:
        content: The row.
        seed: The recipe's.
        weight: Its source's: the whole part always, the rest of it as the chance of one use more.
    """
    whole = math.floor(weight)
    return whole + (position(seed, f"weight:{content}") < (weight - whole) * ALL)
