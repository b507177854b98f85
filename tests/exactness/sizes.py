"""Chunks that are trained by another number of processes than the one before them."""

from __future__ import annotations

import re
from typing import Any

from baton.recipe.recipe import Recipe
from baton.runs.run import Run

OF_OTHERS = ("log", "rng")
EQUAL = ("callbacks", "method", "optimizer", "position", "scheduler", "weights")
PROVEN = {**dict.fromkeys(OF_OTHERS, "of other processes"), **dict.fromkeys(EQUAL, "match"), "scaler": "absent"}
"""What is compared after a restore by another number of processes, and what it gives."""


def resumed(
    run: Run, recipe: Recipe, index: int, legs: Any, inside: Any, parts: tuple[str, ...] = ("optimizer",)
) -> dict[str, str]:
    """Trains a chunk, after an attempt for each part that finds one bit turned over; returns what was compared."""
    legs.adopt(run, recipe)
    before = legs.steps(run)
    for part in parts:
        code, printed = legs.leg(inside.spoiled, run.uri, index, part)
        assert code == 1, printed
        # The others too, where one process's weights are its masters, which are the optimizer's.
        assert re.search(rf"after restoring step \d+, [a-z, ]*{part}[a-z, ]* in memory differ", printed), printed
    assert legs.steps(run) == before
    code, printed = legs.leg(legs.chunk, run.uri, index)
    assert code == 0, printed
    restored = legs.final(run, run.plan().targets[index - 1]).meta.restored
    assert restored.level == "consistent"
    checked: dict[str, str] = restored.checked
    return checked
