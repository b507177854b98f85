"""What a recipe with virtual workers may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import identity
from baton.runs.versions import Fingerprint

BASE: dict[str, Any] = {
    "name": "virtual",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
    "training": {"batch_size": 16, "micro_batch_size": 2, "parallel": {"virtual_workers": 4}},
}


def recipe(*overrides: str) -> Recipe:
    return load.with_overrides(load.validate(BASE, origin="virtual"), overrides)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_step_is_cut_for_the_workers_whatever_the_processes(processes: int) -> None:
    found = recipe(f"training.parallel.processes={processes}")
    assert (found.workers, found.world_size) == (4, processes)
    assert (found.micro_batch_size_per_process, found.gradient_accumulation_steps) == (2, 2)
    assert found.split == f"2 x 2 for each of 4 virtual workers in {processes} process(es)"


def test_without_a_size_a_worker_takes_its_share_at_once() -> None:
    found = recipe("training.micro_batch_size=null")
    assert (found.micro_batch_size_per_process, found.gradient_accumulation_steps) == (4, 1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(["training.parallel.processes=3"], 2, id="three"),
        pytest.param(["training.parallel.processes=7"], 4, id="more"),
        pytest.param(["resources.gpus=3"], 2, id="gpus"),
        pytest.param(["resources.gpus=8"], 4, id="more-gpus"),
        pytest.param([], 1, id="alone"),
    ],
)
def test_processes_that_no_worker_is_left_for_are_not_started(overrides: list[str], expected: int) -> None:
    assert recipe(*overrides).processes == expected


def test_workers_are_part_of_the_identity_and_processes_are_not() -> None:
    alone = identity(recipe())
    assert identity(recipe("training.parallel.processes=4")) == alone
    assert identity(recipe("training.parallel.hang_after=1h")) == alone
    assert identity(recipe("resources.gpus=2")) == alone
    assert identity(recipe("training.parallel.virtual_workers=8")) != alone
    assert identity(recipe("training.parallel.virtual_workers=null")) != alone


def test_the_fingerprint_has_processes_and_tells_no_difference_by_them() -> None:
    one, four = (Fingerprint(world_size=number, virtual_workers=4) for number in (1, 4))
    assert four.to_json()["world_size"] == 4
    assert four.differences(one) == []
    assert four.differences(Fingerprint(world_size=1, virtual_workers=8)) != []
    assert Fingerprint(world_size=4).differences(Fingerprint(world_size=1)) == ["world_size: 1 → 4"]
    assert four.differences(Fingerprint(world_size=4)) != []


@pytest.mark.parametrize("number", [3, 6, 12])
def test_a_number_that_is_no_power_of_two_is_refused(number: int) -> None:
    lower = 2 ** (number.bit_length() - 1)
    with pytest.raises(UserError, match=f"is {number}; expected a power of two, such as {lower}"):
        recipe(f"training.parallel.virtual_workers={number}")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        pytest.param(["training.parallel.virtual_workers=1"], "greater than or equal to 2", id="one"),
        pytest.param(["training.parallel.virtual_workers=128"], "less than or equal to 64", id="many"),
        pytest.param(
            ["training.batch_size=12"],
            "12 rows are not a multiple of 8, a micro-batch in each of 4 virtual workers; take 16",
            id="batch",
        ),
        pytest.param(["training.micro_batch_size=auto"], "micro_batch_size: auto looks for it in one", id="auto"),
        pytest.param(["data.order=blocks"], "data.order: blocks is for one process", id="order"),
        pytest.param(
            ["training.parallel.strategy=fsdp"],
            "strategy: does not go with training.parallel.virtual_workers: no process has the whole gradient with fsdp",
            id="fsdp",
        ),
        pytest.param(
            ["training.parallel.strategy=zero2"],
            "strategy: does not go with .*virtual_workers: no process has the whole gradient with zero2; use ddp",
            id="zero",
        ),
        pytest.param(
            ["training.compile=true"],
            "training.compile: does not go with .*virtual_workers: compiled code depends on the rows",
            id="compile",
        ),
        pytest.param(
            ["training.compile_optimizer=true"], "training.compile: does not go with .*virtual_workers", id="optimizer"
        ),
        pytest.param(
            ["hooks.trainer=own:Trainer"],
            "hooks.trainer: does not go with .*virtual_workers: it may do something else in each process",
            id="trainer",
        ),
        pytest.param(
            ["resources={nodes: 3, gpus: 1, image: org/image}"],
            "virtual_workers: 4 cannot be dealt evenly to 3 nodes with 1 process",
            id="nodes",
        ),
    ],
)
def test_what_does_not_go_with_them_is_refused_also_in_one_process(overrides: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        recipe(*overrides)
