"""`micro_batch_size: auto`: found once, kept by all chunks, and the same bits as the number written out."""

from __future__ import annotations

from typing import Any

import pytest

from baton.models import memory
from baton.recipe.recipe import Recipe
from baton.runs.run import Run


def roomy_for(recipe: Recipe, size: int, legs: Any) -> str:
    """Memory that takes so many rows of a recipe, and not twice as many."""
    taken = (
        memory.estimate(sized, memory.build_skeleton(sized)).total
        for sized in (legs.changed(recipe, training__micro_batch_size=n) for n in (size, 2 * size))
    )
    return str(sum(taken) // 2)


@pytest.fixture
def auto(recipes: dict[str, Recipe], legs: Any) -> Any:
    """Prepares a run of two chunks that finds its micro-batch size, given the memory there is."""

    def prepare(name: str, **resources: Any) -> Run:
        settings = {f"resources__{key}": value for key, value in {"shm": None, **resources}.items()}
        recipe = legs.changed(recipes["scratch"], chunks__count=2, training__micro_batch_size="auto", **settings)
        run: Run = legs.prepare(recipe, name)
        return run

    return prepare


def told(recipes: dict[str, Recipe], legs: Any, size: int) -> Run:
    """Returns a run of two chunks with the number written out, trained."""
    run: Run = legs.prepare(
        legs.changed(recipes["scratch"], chunks__count=2, training__micro_batch_size=size), f"micro-{size}"
    )
    legs.train(run)
    return run


def assert_same(run: Run, other: Run, legs: Any) -> None:
    assert legs.losses(run) == legs.losses(other)
    assert legs.final(run).meta.state == legs.final(other).meta.state
    assert legs.final(run).meta.identity == legs.final(other).meta.identity


def test_estimated_on_the_cpu_and_kept(recipes: dict[str, Recipe], legs: Any, auto: Any) -> None:
    run = auto("micro-auto", memory=roomy_for(recipes["scratch"], 4, legs))
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    assert run.require("micro_batch.json") == {"micro_batch_size": 4, "found_by": "estimate", "device": "cpu"}
    auto("micro-auto", memory="64Gi")  # more memory, from the second chunk on
    code, printed = legs.leg(legs.chunk, run.uri, 2)
    assert code == 0, printed
    assert run.resolved_recipe().micro_batch_size_per_process == 4
    assert_same(run, told(recipes, legs, 4), legs)
    code, printed = legs.leg(legs.evaluate, run.uri)
    assert code == 0, printed


@pytest.mark.slow
def test_tried_on_a_gpu_without_a_trace(recipes: dict[str, Recipe], legs: Any, auto: Any) -> None:
    run = auto("micro-tried")
    for index in (1, 2):
        code, printed = legs.leg(legs.trying_chunk, run.uri, index, 2)
        assert code == 0, printed
    assert run.require("micro_batch.json") == {"micro_batch_size": 2, "found_by": "trial", "device": "a small one"}
    assert_same(run, told(recipes, legs, 2), legs)


def test_not_one_row_fits(legs: Any, auto: Any) -> None:
    run = auto("micro-none", memory="1Mi")
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 2
    assert "micro_batch_size is auto, and not one row of data.max_length 32 fits memory" in printed
    assert run.raw("micro_batch.json") is None


def test_who_was_first_decides(recipes: dict[str, Recipe], legs: Any, auto: Any) -> None:
    run = auto("micro-first", memory=roomy_for(recipes["scratch"], 4, legs))
    run.set_once("micro_batch.json", {"micro_batch_size": 2, "found_by": "trial", "device": "another"})
    legs.train(run)
    assert_same(run, told(recipes, legs, 2), legs)
