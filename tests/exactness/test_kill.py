"""kill -9 at any moment of a chunk: run again, it ends on the same bits."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.run import Run

SLOW = {"start-up", "restore", "first-step", "digest"}
MOMENTS = {
    "start-up": ("phase:import", [5]),
    "restore": ("phase:restore", [5]),
    "first-step": ("step:6", [5]),
    "training": ("step:10", [5, 8]),
    "snapshot": ("writing:2", [5]),
    "digest": ("phase:save", [5]),
    "upload": ("sending:3", [5]),
    "commit": ("phase:commit", [5]),
    "after-commit": ("checkpoint:8", [5, 8]),
}
"""Where the second of three chunks dies, and the steps that are committed then."""


@pytest.mark.parametrize(
    ("moment", "survives"),
    [pytest.param(*of, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, of in MOMENTS.items()],
)
def test_a_killed_chunk_is_made_good(
    moment: str, survives: list[int], recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    recipe = legs.changed(recipes["lora"], chunks__count=3)
    run = legs.prepare(recipe, f"killed-{moment.replace(':', '-')}")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    code, printed = legs.leg(legs.chunk, run.uri, 2, (), moment)
    assert code == -signal.SIGKILL, printed
    committed = {found.step: found for found in CheckpointStore(run).committed() if found.step >= 5}
    assert sorted(committed) == survives
    assert not any(CheckpointStore(run).verify(checkpoint) for checkpoint in committed.values())
    legs.train(run)
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state
