"""A state that DeepSpeed splits, restored by another number of processes: equal to what was saved before a step."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from tests.exactness import sizes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed"),
]
CASES = {
    "fp32": ("scratch", {"training__micro_batch_size": 2, "model__from_scratch__config": {}}),
    "bf16": (
        "scratch",
        {"training__micro_batch_size": 2, "model__from_scratch__config": {}, "training__precision": "bf16"},
    ),
    "lora-bf16": ("lora", {"training__micro_batch_size": 2, "adapter__dropout": 0.0, "training__precision": "bf16"}),
    "uneven": (
        "scratch",
        {
            "training__micro_batch_size": 1,
            "training__batch_size": 12,
            "model__from_scratch__config": {},
            "training__optimizer": "sgd",
            "training__optimizer_options": {"momentum": 0.9},
        },
    ),
}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_processes_become_more_fewer_and_one(
    case: str, strategy: str, recipes: dict[str, Recipe], legs: Any, inside: Any
) -> None:
    name, values = CASES[case]

    def recipe(processes: int, chunks: int = 4) -> Recipe:
        settings = {"strategy": strategy, "processes": processes, "hang_after": "60s"}
        changed: Recipe = legs.changed(
            recipes[name], training__parallel=settings, training__threads=1, chunks__count=chunks, **values
        )
        return changed

    start, *later = [3, 4, 2, 1] if case == "uneven" else [2, 4, 2, 1]
    run = legs.prepare(recipe(start), f"{strategy}-{case}-sizes")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    for index, processes in enumerate(later, 2):
        assert sizes.resumed(run, recipe(processes), index, legs, inside) == sizes.PROVEN
    same = legs.prepare(recipe(start, 1), f"{strategy}-{case}-same")
    legs.train(same)
    ours, theirs = ([loss for _, loss in legs.losses(each)] for each in (run, same))
    assert ours == pytest.approx(theirs, rel=1e-5 if "bf16" not in case else 2e-2)
