"""Rows drawn with replacement (bootstrap; Efron 1979), without torch."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

RESAMPLES = 1000  # draws of the rows for an interval
RESAMPLE_BLOCK = 2**24  # drawn row numbers in memory at once


def resampled(statistics: Array, seed: int) -> Array:
    """Returns the sums over rows drawn with replacement, of shape (`RESAMPLES`, k), by rows and seed alone."""
    rows = len(statistics)
    random = np.random.default_rng([seed, rows])
    block = max(1, min(RESAMPLES, RESAMPLE_BLOCK // rows))
    sums = []
    for first in range(0, RESAMPLES, block):
        count = min(block, RESAMPLES - first)
        taken = random.integers(rows, size=(count, rows)) + np.arange(count)[:, None] * rows
        times = np.bincount(taken.ravel(), minlength=count * rows).reshape(count, rows)
        sums.append(times @ statistics)
    return np.concatenate(sums)
