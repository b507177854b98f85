"""N chunks in N processes give the same bits as one uninterrupted run."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from baton.kfp import processes
from baton.local import forkserver
from baton.recipe.recipe import Recipe
from baton.runs.run import Run


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("name", ["scratch", "lora"])
def test_chunks_end_on_the_bits_of_one_run(
    name: str, count: int, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes[name], chunks__count=count), f"{name}-{count}")
    legs.train(run)
    assert run.plan().num_steps == 15
    assert run.plan().steps_per_epoch == 5
    assert legs.losses(run) == legs.losses(undisturbed[name])
    assert legs.final(run).meta.state == legs.final(undisturbed[name]).meta.state
    assert legs.final(run).meta.restored.step == run.plan().targets[-2] or name == "lora"
    assert set(legs.final(run).meta.restored.checked.values()) == {"match", "absent"}


def test_saving_inside_a_chunk_changes_nothing(
    recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__checkpoint_every=1), "scratch-every-step")
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state


def test_a_fresh_interpreter_goes_on_from_a_forked_process_with_the_same_bits(
    recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__count=2), "scratch-fresh")
    for index, launch in (("1", forkserver.ForkedProcess), ("2", processes.FreshProcess)):
        processes.run(processes.TRAIN_CHUNK, [run.uri, index], lambda _: None, launch)
    assert legs.final(run).meta.restored.step == run.plan().targets[0]
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state


def test_threads_of_the_first_chunk_hold_for_the_run(recipes: dict[str, Recipe], legs: Any) -> None:
    recipe = legs.changed(recipes["scratch"], chunks__count=2, training__threads=2, training__epochs=1)
    run = legs.prepare(recipe, "scratch-threads")
    legs.train(run)
    assert legs.final(run).meta.fingerprint.threads == 2
    assert legs.final(run).meta.restored.level == "bitwise"


def test_a_run_goes_through_again_after_retention_has_taken_what_its_chunks_left(
    recipes: dict[str, Recipe], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__count=3, chunks__keep__last=1), "scratch-again")
    first, second, last = run.plan().targets

    def through() -> dict[str, Any]:
        for index in (1, 2, 3):
            for stage in (legs.chunk, legs.verify_chunk):
                code, printed = legs.leg(stage, run.uri, index)
                assert code == 0, printed
        return {f"chunk-{index}": run.require(f"proof/chunk-00{index}.json") for index in (1, 2)}

    before = through()
    assert legs.steps(run) == [last]
    assert through() == before
    assert [part["step"] for part in before.values()] == [first, second]
    run.storage.remove(run.path("proof/chunk-001.json"))
    code, printed = legs.leg(legs.verify_chunk, run.uri, 1)
    assert code != 0
    assert "the chunk left no checkpoint there" in printed, "without the proof of a look nothing is believed"


def test_checkpoints_that_follow_each_other_change_no_bit(
    recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    changes = {"chunks__count": 2, "chunks__checkpoint_every": "continuous", "chunks__keep__last": 99}
    run = legs.prepare(legs.changed(recipes["scratch"], **changes), "scratch-continuous")
    code, printed = legs.leg(legs.chunk, run.uri, 1, (), "step:7")
    assert code == -signal.SIGKILL, printed
    legs.train(run)
    # The first one is taken when two steps are known beside the first; it may make way for that at the chunk's end.
    assert len(run.attempts(2)[-1].save_stalls) > 1, "more than that at the chunk's end"
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state
    assert legs.losses(run) == legs.losses(undisturbed["scratch"])
