"""A run that early stopping has ended before its planned last step, told by whatever reads finished runs."""

from __future__ import annotations

from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.errors import BatonError, UserError
from baton.local import results
from baton.local.forkserver import ForkedProcess
from baton.models import trained
from baton.prove import audit, prove
from baton.prove.drill import Drill
from baton.recipe.recipe import Recipe
from baton.runs import lineage
from baton.runs.outcomes import TrialEntry, TrialScore
from baton.runs.run import Run, Sweep
from baton.sweep import view
from tests.exactness.test_best import RISING

CHUNKS = 3


@pytest.fixture(scope="module")
def recipe(recipes: dict[str, Recipe], legs: Any) -> Recipe:
    """One whose evaluation stops improving soon."""
    stopping = {"patience": 2, "threshold": 0.0}
    return legs.changed(
        recipes["scratch"], training__early_stopping=stopping, chunks__count=CHUNKS, chunks__keep={"last": 99}, **RISING
    )


@pytest.fixture(scope="module")
def stopped(recipe: Recipe, legs: Any) -> Run:
    """Its run."""
    run = legs.prepare(recipe, "stopped-early")
    legs.train(run)
    assert trained.final_checkpoint(run).step < run.plan().targets[-2]
    return run


def test_what_it_came_to_is_that_of_the_step_at_which_it_ended(stopped: Run) -> None:
    told = prove.outcome(stopped, CHUNKS)
    assert told["steps"][-1] == trained.final_checkpoint(stopped).step
    assert told["state_digest"] == trained.final_checkpoint(stopped).digest


def test_a_run_that_has_not_come_to_its_end_is_told_in_a_sentence(recipe: Recipe, legs: Any) -> None:
    run = legs.prepare(recipe, "stopped-never-began")
    with pytest.raises(BatonError, match=r"is at step 0 of 15"):
        prove.outcome(run, CHUNKS)


@pytest.mark.parametrize(
    ("step", "chunk", "ended"),
    [
        pytest.param(15, 3, True, id="the last step"),
        pytest.param(6, 3, True, id="early stopping, and the score of the last chunk"),
        pytest.param(6, 2, False, id="early stopping, and chunks to come"),
        pytest.param(10, 2, False, id="on its way"),
    ],
)
def test_a_trial_has_ended_with_the_score_of_its_last_chunk(step: int, chunk: int, ended: bool, stopped: Run) -> None:
    sweep = Sweep(stopped.storage, "s")
    run = Run(stopped.storage, f"trial-{step}-{chunk}")
    run.put("plan.json", stopped.require("plan.json"))
    run.write(TrialScore(chunk=chunk, step=step, value=1.0, metrics={}, seconds=1.0, at="2026-11-21T00:00:00Z"), chunk)
    trial = view.read_trial(sweep, TrialEntry(id="t000", run=run.name, values={}), with_losses=False)
    assert view._has_ended(trial) == ended


def test_it_counts_as_trained(stopped: Run) -> None:
    member = lineage.family(stopped.storage)[stopped.name]
    assert (member.state, member.step) == ("interrupted", trained.final_checkpoint(stopped).step)
    assert results.result(stopped)["steps"] == member.step


@pytest.mark.parametrize("index", range(1, CHUNKS + 1))
def test_each_chunk_is_audited_or_was_not_trained(index: int, stopped: Run) -> None:
    ended, plan = trained.final_checkpoint(stopped).step, stopped.plan()
    store = CheckpointStore(stopped)
    begin = plan.target(index - 1) if index > 1 else 0
    if begin >= ended:
        with pytest.raises(
            UserError, match=f"chunk {index} of .* was not trained: early stopping ended .* step {ended}"
        ):
            audit.chunk_span(store, index)
    else:
        assert audit.chunk_span(store, index).after.step == min(plan.target(index), ended)


@pytest.mark.slow
def test_it_is_proven(recipe: Recipe, legs: Any) -> None:
    proof = prove.prove(recipe, [1, 3], name="stopped-proof")
    assert proof["exact"], proof["first_difference"]
    assert [row["steps"][-1] < 15 for row in proof["variants"]] == [True, True]
    assert "step" in prove.render(proof)
    control = prove.prove(recipe, [1, 3], name="stopped-control", leave_out=["rng"])
    assert not control["exact"]


@pytest.mark.slow
def test_it_is_drilled(recipe: Recipe, legs: Any) -> None:
    report = Drill(
        legs.changed(recipe, chunks__count=2), kills=2, seed=3, name="stopped-drill", launch=ForkedProcess
    ).run()
    assert report["exact"]
    assert len(report["kills"]) == 2
