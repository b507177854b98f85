"""What a recipe may ask for with several processes."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import identity

BASE: dict[str, Any] = {
    "name": "parallel",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
    "training": {"batch_size": 8},
}


def recipe(*overrides: str, **sections: Any) -> Recipe:
    found = load.validate({**BASE, **sections}, origin="parallel")
    return load.with_overrides(found, overrides)


def test_one_process_is_what_it_was() -> None:
    alone = recipe("training.micro_batch_size=2")
    assert (alone.training.parallel, alone.world_size) == (None, 1)
    assert (alone.micro_batch_size_per_process, alone.gradient_accumulation_steps) == (2, 4)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(["training.parallel.processes=2"], ("ddp", 2, 4, 1), id="processes"),
        pytest.param(["resources.gpus=4"], ("ddp", 4, 2, 1), id="gpus"),
        pytest.param(["resources.gpus=4", "training.parallel=fsdp"], ("fsdp", 4, 2, 1), id="short"),
        pytest.param(["resources.gpus=2", "resources.nodes=2"], ("ddp", 4, 2, 1), id="nodes"),
        pytest.param(["training.parallel.processes=2", "training.micro_batch_size=1"], ("ddp", 2, 1, 4), id="micro"),
    ],
)
def test_the_batch_is_the_recipes_whatever_the_processes(overrides: list[str], expected: tuple[object, ...]) -> None:
    found = recipe(*overrides)
    assert (
        found.parallel.strategy,
        found.world_size,
        found.micro_batch_size_per_process,
        found.gradient_accumulation_steps,
    ) == expected
    assert found.world_size * found.micro_batch_size_per_process * found.gradient_accumulation_steps == 8


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        pytest.param([], 1, id="one-step"),
        pytest.param(["training.micro_batch_size=1"], 4, id="passes"),
        pytest.param(["training.grpo.steps_per_generation=2"], 2, id="two-steps"),
    ],
)
def test_a_round_has_as_many_completions_whatever_the_processes(overrides: list[str], passes: int) -> None:
    grpo = ["training.method=grpo", "training.grpo={rewards: [length], num_generations: 2}"]
    alone, both = recipe(*grpo, *overrides), recipe(*grpo, *overrides, "training.parallel.processes=2")
    assert alone.training.round_size == both.training.round_size == passes * both.micro_batch_size_per_process * 2


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        pytest.param(["resources.nodes={min: 1, max: 4}"], [4, 2, 1], id="all"),
        pytest.param(["resources.nodes={min: 2, max: 7}"], [4, 2], id="bounds"),
        pytest.param(["resources.nodes={max: 512}", "training.parallel.processes=2"], [4, 2, 1], id="processes"),
        pytest.param(["resources.nodes={max: 4}", "resources.gpus=8"], [1], id="one"),
        pytest.param(["resources.nodes=2"], [2], id="fixed"),
    ],
)
def test_the_numbers_of_nodes_that_leave_no_trace(overrides: list[str], counts: list[int]) -> None:
    found = recipe("training.parallel.virtual_workers=8", *overrides)
    assert (found.node_counts, found.max_nodes) == (counts, counts[0])
    assert found.world_size == counts[0] * found.processes
    assert found.gradient_accumulation_steps * found.micro_batch_size_per_process == 1
    assert identity(found) == identity(recipe("training.parallel.virtual_workers=8"))
    assert Recipe.model_validate(found.model_dump(mode="json")) == found


def test_the_identity_does_not_depend_on_them() -> None:
    assert identity(recipe("training.parallel.processes=2")) == identity(recipe())


TWO = ["training.parallel.processes=2"]
FSDP = ["training.parallel={strategy: fsdp, processes: 2}"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        pytest.param(["training.parallel.processes=3"], "8 rows are not a multiple of 3", id="batch"),
        pytest.param(
            ["training.parallel.processes=2", "training.micro_batch_size=8"],
            "not a multiple of 16.*take 16",
            id="micro",
        ),
        pytest.param(["training.parallel.processes=2", "training.micro_batch_size=auto"], "auto looks", id="auto"),
        pytest.param(["training.parallel.processes=4", "resources.gpus=2"], "4 for 2 accelerator", id="gpus"),
        pytest.param(
            [*FSDP, "training.method=kto", "training.kto={sync_reference: {every: 2}}"],
            "training.kto.sync_reference: does not go with .* fsdp",
            id="moving",
        ),
        pytest.param(
            [*FSDP, "training.method=grpo", "training.grpo={rewards: [information_gain]}"],
            "training.grpo.rewards: does not go with .* fsdp: information_gain asks the model",
            id="gain",
        ),
        pytest.param(
            [
                *TWO,
                "training.micro_batch_size=2",
                "training.method=grpo",
                "training.grpo={rewards: [length], num_generations: 2, steps_per_generation: 3}",
            ],
            "grpo.steps_per_generation: a round of 6 completions is not a multiple of 4",
            id="round",
        ),
        pytest.param(["training.parallel.processes=2", "data.order=blocks"], "blocks is for one process", id="order"),
        pytest.param(
            [*FSDP, "adapter={type: lora}", "model.quantization={bits: 4}", "resources.gpus=2"],
            "model.quantization: does not go with .* fsdp",
            id="quantization",
        ),
        pytest.param([*FSDP, "training.compile_optimizer=true"], "compile_optimizer: does not go with", id="compile"),
        pytest.param([*FSDP, "training.parallel.offload=cpu"], "already", id="offload"),
        pytest.param(
            ["training.parallel={processes: 2, offload: cpu}"], "offload: only shards are held", id="offload-ddp"
        ),
        pytest.param(
            ["resources.nodes={min: 1, max: 5}", "resources.gpus=2"],
            "from 1 to 5 nodes train the same bits with virtual workers alone; .*virtual_workers, .* to 8, or nodes",
            id="range",
        ),
        pytest.param(
            ["resources.nodes={min: 3, max: 3}", "training.parallel={virtual_workers: 8, processes: 2}"],
            r"no number from 3 to 3, times 2 process\(es\) on each, divides the 8 virtual workers; .* 1 or 2 or 4",
            id="range-without-one",
        ),
        pytest.param(["resources.nodes={min: 4, max: 2}"], "resources.nodes: min is 4 and max 2", id="range-falls"),
        pytest.param(["resources.nodes={min: 2}"], "resources.nodes.max: missing", id="range-open"),
        pytest.param(["resources.nodes=0"], r"1 problem\(s\):\n.*nodes: Input .* equal to 1", id="no-node"),
        pytest.param(["training.parallel.hang_after=never"], "expected a time such as 30s", id="hang"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        recipe(*overrides)
