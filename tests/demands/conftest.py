"""Runs of Baton that several demands look at."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness.conftest import base_model, grid, legs, recipes  # noqa: F401
from tests.exactness.matrix import Cell

NOISY = {"hooks": {"collator": {"use": "tests.resume.own:NoisyCollator"}}}


@pytest.fixture(scope="session")
def adapted(recipes: dict[str, Recipe], legs: Any) -> Run:  # noqa: F811
    """A LoRA run of 15 steps with dropout, in one chunk, with checkpoints at 4, 8, 12 and 15."""
    run: Run = legs.prepare(recipes["lora"], "adapted")
    legs.train(run)
    assert sorted(legs.steps(run)) == [4, 8, 12, 15]
    return run


@pytest.fixture(scope="session")
def noisy(grid: Any, legs: Any) -> Run:  # noqa: F811
    """A run of 8 steps whose collator draws random numbers, with checkpoints at 5 and 8."""
    recipe = grid(Cell("sft", "full", "random collator", NOISY, steps=8))
    run: Run = legs.prepare(legs.changed(recipe, chunks__checkpoint_every=5), "noisy")
    legs.train(run)
    return run


@pytest.fixture(scope="session")
def again(legs: Any) -> Any:  # noqa: F811
    """Trains the end of a finished run once more: in a fresh process, from its checkpoint of a step.

    Returns what it had logged and come to before, what it has now, and what was printed.
    """

    def end(run: Run) -> tuple[Any, Any]:
        return legs.losses(run), legs.final(run).meta.state

    def train(run: Run, step: int, leg: Any = None, *given: Any) -> tuple[Any, Any, str]:
        before = end(run)
        for later in (each for each in legs.steps(run) if each > step):
            shutil.rmtree(Path(run.storage.key(run.path(f"checkpoints/step-{later:08d}"))))
        code, printed = legs.leg(leg or legs.chunk, run.uri, 1, *given)
        assert code == 0, printed
        return before, end(run), printed

    return train
