"""What a recipe may ask for where virtual workers write."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe


def recipe(method: str, **settings: Any) -> Recipe:
    """Returns a recipe of four virtual workers and rounds of 16 completions, four in a group."""
    rewarded = {"rewards": ["length"], "num_generations": 4}
    own = {"teacher": "org/teacher"} if method == "distillation" else rewarded
    own |= {name: settings.pop(name) for name in list(settings) if not name.endswith("_size")}
    training = {"batch_size": 16, "micro_batch_size": 2, "parallel": {"virtual_workers": 4}, **settings}
    document = {"name": "rounds", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}}
    return load.validate({**document, "training": {**training, "method": method, method: own}}, origin="rounds")


@pytest.mark.parametrize("method", ["grpo", "rloo", "distillation"])
def test_a_round_is_cut_for_the_workers(method: str) -> None:
    found = recipe(method)
    assert (found.micro_batch_size_per_process, found.gradient_accumulation_steps) == (2, 2)
    assert found.steps_per_generation == 2


def test_a_round_of_several_steps_has_whole_groups() -> None:
    # Micro-batches count as one process makes them: of 2 rows, 32 in a round, 8 for each worker.
    assert recipe("grpo", steps_per_generation=32, num_generations=16).steps_per_generation == 8


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        pytest.param(
            "grpo",
            {"num_generations": 8},
            "training.grpo.num_generations: a virtual worker compares the 8 completions of a prompt, and writes 4 in a "
            "round. Let a round have a multiple of 32",
            id="groups",
        ),
        pytest.param(
            "grpo",
            {"scale_rewards": "batch"},
            "training.grpo.scale_rewards: does not go with training.parallel.virtual_workers",
            id="spread",
        ),
        pytest.param(
            "rloo",
            {"normalize_advantages": True},
            "training.rloo.normalize_advantages: does not go with training.parallel.virtual_workers",
            id="normalized",
        ),
    ],
)
def test_what_a_worker_cannot_see_is_refused(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe(method, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(("num_generations", "rows"), [(8, 32), (16, 64)])
def test_the_round_that_the_message_names_has_whole_groups(num_generations: int, rows: int) -> None:
    with pytest.raises(UserError, match=f"multiple of {rows} "):
        recipe("rloo", num_generations=num_generations)
    assert recipe("rloo", num_generations=num_generations, batch_size=rows).steps_per_generation == rows // 8
