"""Two processes at one chunk, and one that sleeps through its successor's life: one manifest a step, the same bits."""

from __future__ import annotations

import importlib
import signal
import uuid
from typing import Any

import pytest

from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.events import CheckpointCommitted
from baton.recipe.recipe import Recipe
from baton.runs.run import Run


@pytest.fixture
def aside(legs: Any) -> Any:
    """Legs that run beside the test."""
    return importlib.import_module("background")


@pytest.fixture(params=["folder", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def racing(request: pytest.FixtureRequest, recipes: dict[str, Recipe], legs: Any) -> Run:
    """A run of three chunks, none begun, on a folder and on S3."""
    store = {} if request.param == "folder" else {"store": {"uri": request.getfixturevalue("s3_store")}}
    chunks = {"chunks__count": 3, "chunks__checkpoint_every": 2, "chunks__keep": {"last": 2}}
    recipe = legs.changed(recipes["lora"], **chunks, **store)
    return legs.prepare(recipe, f"race-{uuid.uuid4().hex[:8]}")


def _committed(run: Run) -> dict[int, Checkpoint]:
    damaged: list[int] = []
    found = {each.step: each for each in CheckpointStore(run).committed(lambda step, _: damaged.append(step))}
    assert not damaged
    return found


def _finish(run: Run, legs: Any, first: int) -> None:
    for index in range(first, 4):
        for function in (legs.chunk, legs.verify_chunk):
            code, printed = legs.leg(function, run.uri, index)
            assert code == 0, printed


def _require_undisturbed(run: Run, undisturbed: dict[str, Run], legs: Any) -> None:
    store = CheckpointStore(run)
    assert not any(store.verify(checkpoint) for checkpoint in _committed(run).values())
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state


def test_two_processes_at_one_chunk_commit_each_step_once(
    racing: Run, undisturbed: dict[str, Run], legs: Any, aside: Any
) -> None:
    both = [aside.Background(aside.slow_chunk, racing.uri, 1, 0.05) for _ in range(2)]
    assert [chunk.wait() for chunk in both] == [0, 0], [chunk.printed for chunk in both]
    said = [{e.step: e.digest for e in chunk.events if isinstance(e, CheckpointCommitted)} for chunk in both]
    shared = said[0].keys() & said[1].keys()
    assert all(said[0][step] == said[1][step] for step in shared)
    manifests = [name for name in racing.storage.find(racing.path("checkpoints")) if "/manifest" in name]
    assert len(manifests) == len({name.split("/")[0] for name in manifests})
    assert max(_committed(racing)) == racing.plan().targets[0]
    _finish(racing, legs, 2)
    _require_undisturbed(racing, undisturbed, legs)


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        ("save", 2),
        ("commit", 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("upload", 4), ("commit", 5))),
    ],
)
def test_a_process_that_sleeps_through_its_successors_life_changes_nothing(
    phase: str, step: int, racing: Run, undisturbed: dict[str, Run], legs: Any, aside: Any
) -> None:
    sleeper = aside.Background(aside.pausing_chunk, racing.uri, 1, phase, step)
    sleeper.wait_for(aside.Paused)
    _finish(racing, legs, 1)
    before = _committed(racing)
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait() == 0, sleeper.printed
    assert _committed(racing).keys() >= before.keys()
    assert {at: _committed(racing)[at] for at in before} == before
    assert max(_committed(racing)) == racing.plan().num_steps
    _require_undisturbed(racing, undisturbed, legs)


def test_a_process_with_other_bits_stops_and_harms_nothing(
    recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, aside: Any
) -> None:
    """The negative control: what is not the same state is not taken for it."""
    run = legs.prepare(legs.changed(recipes["lora"], chunks__count=3), "race-other-bits")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    sleeper = aside.Background(aside.pausing_chunk, run.uri, 2, "commit", 8, ("rng",))
    sleeper.wait_for(aside.Paused)
    assert legs.leg(legs.chunk, run.uri, 2)[0] == 0
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait() == 1
    assert "another process committed step 8" in sleeper.printed or "another process" in str(sleeper.events)
    assert legs.leg(legs.chunk, run.uri, 3)[0] == 0
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state
