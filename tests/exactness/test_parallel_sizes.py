"""A state in shards, restored by another number of processes: equal to what was saved before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from tests.exactness import sizes

STILL = {"model__from_scratch__config": {}}


def in_shards(legs: Any, recipe: Recipe, processes: int, **values: Any) -> Recipe:
    """Returns a recipe in shards of several processes, or as a whole in one."""
    settings = {"strategy": "fsdp", "processes": processes, "hang_after": "60s"}
    changed: Recipe = legs.changed(recipe, training__parallel=settings, training__threads=1, **values)
    return changed


def test_one_process_continues_what_two_have_in_shards(recipes: dict[str, Recipe], legs: Any, inside: Any) -> None:
    run = legs.prepare(in_shards(legs, recipes["scratch"], 2, chunks__count=2, **STILL), "shards-2-1")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    alone = in_shards(legs, recipes["scratch"], 1, chunks__count=2, **STILL)
    assert sizes.resumed(run, alone, 2, legs, inside, ("optimizer", "weights")) == sizes.PROVEN
    assert "model.safetensors" in legs.final(run).manifest.files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scratch", "lora"])
def test_processes_become_more_fewer_one_and_several(
    name: str, recipes: dict[str, Recipe], legs: Any, inside: Any
) -> None:
    values: dict[str, Any] = {"chunks__count": 5, "training__micro_batch_size": 2}
    values |= STILL if name == "scratch" else {"adapter__dropout": 0.0, "training__log_every": 1}
    run = legs.prepare(in_shards(legs, recipes[name], 2, **values), f"shards-{name}-sizes")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    for index, processes in [(2, 4), (3, 2), (4, 1), (5, 2)]:
        recipe = in_shards(legs, recipes[name], processes, **values)
        assert sizes.resumed(run, recipe, index, legs, inside) == sizes.PROVEN
    same = legs.prepare(in_shards(legs, recipes[name], 2, **{**values, "chunks__count": 1}), f"shards-{name}-same")
    legs.train(same)
    ours, theirs = ([loss for _, loss in legs.losses(each)] for each in (run, same))
    assert ours == pytest.approx(theirs, rel=1e-5)
