"""A chunk that is preempted saves, says so with exit 0, and the next slot resumes to the same bits."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from typing import Any

import pytest

from baton import events
from baton.recipe.recipe import Recipe
from baton.runs.run import Run


@pytest.fixture
def aside(legs: Any) -> Any:
    """Legs that run beside the test."""
    return importlib.import_module("background")


def _outcomes(run: Run) -> list[tuple[int, str, int]]:
    return [(attempt.chunk, attempt.outcome, attempt.to_step) for attempt in run.attempts()]


def _to_the_end(run: Run, legs: Any, first: int) -> None:
    slots = len(run.plan().targets) + run.recipe().chunks.spare
    for index in range(first, slots + 1):
        code, printed = legs.leg(legs.chunk, run.uri, index)
        assert code == 0, printed


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("file", marks=pytest.mark.slow)])
def test_a_notice_saves_the_step_under_way_and_spare_slots_finish(
    how: str, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, aside: Any, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    preemption = {"notice_file": str(notice)}
    chunks = {"chunks__count": 2, "chunks__spare": 1, "chunks__checkpoint_every": 100}  # none but the notice's
    recipe = legs.changed(recipes["lora"], **chunks, chunks__preemption=preemption)
    run = legs.prepare(recipe, f"preempted-{how.lower()}")
    chunk = aside.Background(aside.noticed_chunk, run.uri, 1, 2, None if how == "SIGTERM" else str(notice))
    saved = chunk.wait_for(events.CheckpointCommitted)
    assert chunk.wait() == 0, chunk.printed
    notice.unlink(missing_ok=True)
    partial = chunk.wait_for(events.Partial)
    assert partial.step == saved.step < run.plan().targets[0]
    if how == "SIGTERM":
        assert saved.step == 3
    _to_the_end(run, legs, 2)
    assert _outcomes(run) == [
        (1, "partial", saved.step),
        (2, "done", run.plan().num_steps),
        (3, "already_done", run.plan().num_steps),
    ]
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state


def test_the_last_slot_taken_away_leaves_the_run_unfinished_and_says_how_to_go_on(
    recipes: dict[str, Recipe], legs: Any, aside: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["lora"], chunks__count=1), "out-of-slots")
    chunk = aside.Background(aside.slow_chunk, run.uri, 1, 0.15)
    chunk.wait_for(events.Step, step=2)
    chunk.signal(signal.SIGTERM)
    assert chunk.wait() == 0
    assert legs.leg(legs.verify_chunk, run.uri, 1)[0] == 0
    step = _outcomes(run)[0][2]
    code, printed = legs.leg(aside.judge, run.uri)
    assert code == 1
    assert f"is at step {step} of 15" in printed
    assert "baton run RECIPE --run out-of-slots" in printed


def test_a_machine_taken_away_before_the_first_step_costs_nothing(
    recipes: dict[str, Recipe], legs: Any, aside: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["lora"], chunks__count=2), "taken-at-once")
    chunk = aside.Background(legs.chunk, run.uri, 1)
    chunk.wait_for(events.Phase, phase="import")
    chunk.signal(signal.SIGTERM)
    assert chunk.wait() == 0, chunk.printed
    assert _outcomes(run) in ([(1, "partial", 0)], [(1, "partial", 1)])
    assert legs.leg(legs.verify_chunk, run.uri, 1)[0] == 0
