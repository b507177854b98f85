"""Sums whose order is a tree over the workers, whichever processes hold them."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baton.train import virtual
from baton.train.virtual import Gradients, TreeSum, exchange

WORKERS = 8


def parameters() -> list[nn.Parameter]:
    """Some that are exchanged together, one alone, of another type, and some that not all workers use."""
    of_floats = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7,), (64, 2), (1,), (4,), ())]
    return [*of_floats, nn.Parameter(torch.zeros(9, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2, 3))]


def gradients(worker: int) -> Gradients:
    """A worker's, of sizes far apart so that their sum depends on its order; from some, None for the last ones."""
    drawn = torch.Generator().manual_seed(worker)
    made: Gradients = []
    for number, parameter in enumerate(parameters()):
        sizes = 10 ** torch.empty(parameter.shape).uniform_(-4, 4, generator=drawn)
        made.append((torch.randn(parameter.shape, generator=drawn) * sizes).to(parameter.dtype))
        if (number == 3 and worker != 5) or (number == 4 and worker > 1) or number == 7:
            made[-1] = None
    made[2] = made[2].T.contiguous().T  # type: ignore[union-attr]  # as autograd leaves some
    return made


def summed(workers: range) -> Gradients:
    total = TreeSum()
    for worker in workers:
        total.add(gradients(worker))
    return total.take()


def same(ours: Gradients, theirs: Gradients) -> bool:
    """Whether they have the same bits."""
    pairs = list(zip(ours, theirs, strict=True))
    assert all((a is None) == (b is None) for a, b in pairs)
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return all(torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()) for a, b in both)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_pairs_are_added_and_then_their_sums(workers: int) -> None:
    level = [gradients(worker)[0] for worker in range(workers)]
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]  # type: ignore[operator]
    total = summed(range(workers))[0]
    in_turn = gradients(0)[0]
    for worker in range(1, workers):
        in_turn = in_turn + gradients(worker)[0]  # type: ignore[operator]
    assert torch.equal(total, level[0])  # type: ignore[arg-type]
    assert torch.equal(total, in_turn) == (workers <= 2), "the order shows"  # type: ignore[arg-type]


def test_of_the_sums_a_logarithm_is_held() -> None:
    total, held = TreeSum(), []
    for worker in range(WORKERS):
        total.add(gradients(worker))
        held.append(len(total._sums))
    assert held == [1, 1, 2, 1, 2, 2, 3, 1]
    total.take()
    total.add(gradients(3))
    assert same(total.take(), gradients(3)), "it has begun anew"


def test_a_parameter_that_a_worker_has_not_used_counts_as_zero() -> None:
    total = TreeSum()
    for value in (None, None, None, 1.5):
        total.add([None if value is None else torch.tensor([value, -0.0]), None])
    used, unused = total.take()
    assert unused is None, "of no worker: the optimizer leaves it alone"
    assert used is not None
    assert used.tolist() == [1.5, 0.0]
    assert not used.signbit().any(), "0 + −0 is 0, as where zeros are sent"


def _exchanged(rank: int, processes: int, folder: str, bucket: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    virtual.BUCKET = bucket
    share = WORKERS // processes
    total = exchange(summed(range(rank * share, (rank + 1) * share)), parameters(), processes)
    torch.save(total, Path(folder, str(rank)))
    dist.destroy_process_group()


@pytest.mark.parametrize(("processes", "bucket"), [(2, virtual.BUCKET), (4, 100), (4, virtual.BUCKET), (8, 1)])
def test_any_number_of_processes_comes_to_the_sum_of_one(processes: int, bucket: int) -> None:
    whole = summed(range(WORKERS))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _exchanged, (processes, folder, bucket), nprocs=processes, start_method="fork"
        )
        found = [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(processes)]
    assert all(same(ours, whole) for ours in found)
    assert whole[7] is None


def test_one_kind_of_gradients_is_cut_into_parts_of_bounded_size() -> None:
    whole = [gradient for gradient in summed(range(WORKERS)) if gradient is not None]
    tree_parts = [[x.nbytes for x in part] for part in virtual._parts(whole, 2)]
    assert [len(part) for part in tree_parts] == [6, 1], "another type is another part"
    assert list(itertools.chain(*tree_parts)) == [x.nbytes for x in whole]
