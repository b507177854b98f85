"""Rows dealt to processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.train.samplers import DistributedBatches, blank, distribute_rows, follow_epochs


def pieces(num_rows: int, micro: int, world_size: int, batch_size: int = 8) -> list[list[int]]:
    dealt = DistributedBatches(range(num_rows), batch_size=batch_size, micro=micro, world_size=world_size)
    found = list(dealt)
    assert len(dealt) == len(found)
    assert len(found) % world_size == 0, "each process has as many"
    return found


def test_a_full_step_is_cut_into_micro_batches_for_each_process_in_turn() -> None:
    assert pieces(8, 2, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pieces(16, 4, 2) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("rest", "micro", "world_size", "expected"),
    [
        pytest.param(4, 2, 2, [[8, 9], [10, 11]], id="even"),
        pytest.param(5, 2, 2, [[8], [9], [10], [11, 12]], id="uneven"),
        pytest.param(2, 2, 2, [[8], [9]], id="one-each"),
        pytest.param(3, 1, 2, [[8], [9, 10]], id="one-more-than-micro"),
        pytest.param(6, 1, 4, [[8], [9, 10], [11], [12, 13]], id="four"),
        pytest.param(1, 2, 2, [[8], [8]], id="filler"),
        pytest.param(2, 1, 4, [[8], [9], [8], [8]], id="two-fillers"),
    ],
)
def test_a_last_step_of_fewer_rows_is_split_over_the_processes(
    rest: int, micro: int, world_size: int, expected: list[list[int]]
) -> None:
    assert pieces(8 + rest, micro, world_size)[8 // micro :] == expected


def test_fillers_are_known() -> None:
    dealt = DistributedBatches(range(18), batch_size=8, micro=2, world_size=4)
    assert [dealt.is_filler(2, rank) for rank in range(4)] == [False, False, True, True]
    assert not any(dealt.is_filler(step, rank) for step in (0, 1) for rank in range(4))
    even = DistributedBatches(range(16), batch_size=8, micro=2, world_size=4)
    assert not any(even.is_filler(1, rank) for rank in range(4))


def test_a_filler_counts_for_nothing() -> None:
    import torch

    batch = {"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3)}
    blank([batch])
    assert batch["labels"].tolist() == [[-100, -100, -100]]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("rest", range(1, 8))
def test_of_means_over_rows_each_row_of_a_step_counts_as_much(rest: int, micro: int, world_size: int) -> None:
    dealt = DistributedBatches(range(8 + rest), batch_size=8, micro=micro, world_size=world_size)
    found = list(dealt)
    full = 8 // micro
    counted = dict.fromkeys(range(8 + rest), 0.0)
    for step, pieces in enumerate((found[:full], found[full:])):
        passes = len(pieces) // world_size
        for rank in range(world_size):
            for piece, share in zip(pieces[rank::world_size], dealt.shares(step, rank), strict=True):
                for row in piece:  # a mean over its rows, and over passes and processes
                    counted[row] += share / len(piece) / passes / world_size
    assert counted == pytest.approx({row: 1 / 8 if row < 8 else 1 / rest for row in counted})
    assert dealt.shares(0, 1) == [1.0] * (full // world_size), "exactly"
    shares = [share for rank in range(world_size) for share in dealt.shares(1, rank)]
    assert all(share == 1.0 for share in shares) or 1.0 not in shares, "all processes see whether they are uneven"


class Backwards:
    """Rows in their order, and in later epochs the other way round."""

    epoch = 0

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_rows)[:: -1 if self.epoch else 1])


def test_the_order_is_the_samplers_own() -> None:
    dealt = DistributedBatches(Backwards(4), batch_size=4, micro=1, world_size=2)
    assert list(dealt) == [[0], [1], [2], [3]]
    dealt.set_epoch(1)
    assert list(dealt) == [[3], [2], [1], [0]]


def test_an_order_without_epochs_stays() -> None:
    dealt = DistributedBatches(range(4), batch_size=4, micro=1, world_size=2)
    dealt.set_epoch(1)
    assert list(dealt) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("dealt", [False, True])
def test_the_epoch_reaches_the_sampler_where_batches_are_skipped(dealt: bool) -> None:
    from accelerate import skip_first_batches
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
    from torch.utils.data import BatchSampler

    shard = BatchSamplerShard(BatchSampler(Backwards(8), 2, False), num_processes=2, process_index=0)
    loader = DataLoaderShard(list(range(8)), batch_sampler=shard)
    if dealt:
        distribute_rows(loader, batch_size=4, micro=2, world_size=2)
    follow_epochs(loader)
    skipped = skip_first_batches(loader, 1)
    skipped.batch_sampler.batch_sampler.set_epoch(1)  # as Trainer does, which knows of one layer
    assert [batch.tolist() for batch in skipped] == [[3, 2]]
