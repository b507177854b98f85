"""Gradients that are added within a backward pass, and large ones that are exchanged where they are: the same sums."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.utils.checkpoint

from baton.errors import BatonError
from baton.train import virtual
from baton.train.virtual import Gradients, TreeSum

WORKERS = 4
SHAPES = [(3,), (1024, 700), (700, 1024), (1025, 1023), (5, 7), (1,)]
"""Some are exchanged where they are, some are no multiple of the processes; the third is not contiguous."""
UNUSED = {0: {4}, 1: {0, 4}, 2: {1, 4}, 3: {4}}
"""Parameters that a worker does not use: the fifth is used by none."""


def parameters() -> list[torch.nn.Parameter]:
    tensors = [torch.zeros(shape) for shape in SHAPES]
    tensors[2] = tensors[2].T
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def gradient(worker: int, index: int) -> torch.Tensor:
    """Returns numbers of many magnitudes, a negative zero among them."""
    drawn = torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(100 * worker + index)).exp2_() * 3
    drawn.view(-1)[0] = -0.0
    return drawn.T if index == 2 else drawn


def of_own(process: int, processes: int, *, early: bool) -> tuple[list[torch.nn.Parameter], Gradients]:
    """Returns the sum over a process's workers, each of which makes two backward passes: one uses the first and fourth
    parameters, the last all but the first."""
    trained, total = parameters(), TreeSum()
    share = WORKERS // processes
    for worker in range(process * share, (process + 1) * share):
        used = set(range(len(SHAPES))) - UNUSED[worker]
        backward(trained, worker, used & {0, 3})
        with total.adding(trained) if early else contextlib.nullcontext():
            backward(trained, worker, used - {0})
        total.add([parameter.grad for parameter in trained])
        for parameter in trained:
            parameter.grad = None
    return trained, total.take()


def backward(trained: list[torch.nn.Parameter], worker: int, used: set[int]) -> None:
    """Makes a worker's backward pass through some of the parameters."""
    torch.autograd.backward([trained[index] for index in used], [gradient(worker, index) for index in used])


def run(process: int, processes: int, folder: str) -> None:
    """Leaves in a folder what a process comes to."""
    virtual.BUCKET = 2**20  # so that a gradient is in several slices, and there are more buckets than are on their way
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process, world_size=processes)
    trained, own = of_own(process, processes, early=True)
    torch.save(virtual.exchange(own, trained, processes), f"{folder}/{process}.pt")
    dist.destroy_process_group()


def same(left: Gradients, right: Gradients) -> bool:
    """Tells whether all bits are the same, signs of zeros among them."""
    return all(
        (a is None) == (b is None)
        and (a is None or torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)))  # type: ignore[union-attr]
        for a, b in zip(left, right, strict=True)
    )


def test_the_sum_is_a_tree_in_which_the_unused_count_as_zero() -> None:
    _, total = of_own(0, 1, early=True)
    for index, found in enumerate(total):
        zero = torch.zeros_like(gradient(0, index))
        a, b, c, d = (zero if index in UNUSED[worker] else gradient(worker, index) for worker in range(WORKERS))
        assert (found is None) == (index == 4)
        assert found is None or same([found], [((a + b) + (c + d)) * (2 if index == 3 else 1)])
    in_turn = 2 * sum(gradient(worker, 3) for worker in range(WORKERS))
    assert not same([total[3]], [in_turn]), "the order tells"


def test_it_is_the_same_whenever_gradients_are_added() -> None:
    assert same(of_own(0, 1, early=True)[1], of_own(0, 1, early=False)[1])


@pytest.mark.parametrize("processes", [2, 4])
def test_it_is_the_same_in_all_processes(processes: int, tmp_path: Path) -> None:
    run_all = torch.multiprocessing.start_processes
    run_all(run, (processes, str(tmp_path)), nprocs=processes, start_method="fork")
    alone = of_own(0, 1, early=True)[1]
    for process in range(processes):
        found = torch.load(f"{tmp_path}/{process}.pt")
        assert same(found, alone)
        assert [x.stride() for x in found if x is not None] == [x.stride() for x in alone if x is not None]


def test_what_is_added_early_is_not_held() -> None:
    trained, total = parameters(), TreeSum()
    total.add([gradient(0, index) for index in range(len(SHAPES))])
    with total.adding(trained):
        for index, parameter in enumerate(trained):
            parameter.backward(gradient(1, index))
            assert parameter.grad is None
    for parameter in trained:
        parameter.backward(torch.ones_like(parameter))
        assert parameter.grad is not None, "no hook is left"


def test_a_gradient_that_comes_in_two_parts_is_refused() -> None:
    """A weight that two reentrant checkpoints share: each has a backward pass of its own within that of the loss."""
    weight, total = torch.nn.Parameter(torch.eye(2)), TreeSum()

    def part(rows: torch.Tensor) -> torch.Tensor:
        return rows @ weight

    def passes() -> None:
        rows = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            rows = torch.utils.checkpoint.checkpoint(part, rows, use_reentrant=True)
        with total.adding([weight]):
            rows.sum().backward()

    total.add([torch.ones(2, 2)])
    with pytest.raises(BatonError, match="twice"):
        passes()
