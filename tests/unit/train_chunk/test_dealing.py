"""Rows dealt to processes."""

from __future__ import annotations

import pytest

from components.shared.errors import UserError
from components.train_chunk.dealing import Dealt, blank


def pieces(num_rows: int, micro: int, world_size: int, batch_size: int = 8) -> list[list[int]]:
    dealt = Dealt(range(num_rows), batch_size=batch_size, micro=micro, world_size=world_size)
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
    dealt = Dealt(range(18), batch_size=8, micro=2, world_size=4)
    assert [dealt.is_filler(2, rank) for rank in range(4)] == [False, False, True, True]
    assert not any(dealt.is_filler(step, rank) for step in (0, 1) for rank in range(4))
    even = Dealt(range(16), batch_size=8, micro=2, world_size=4)
    assert not any(even.is_filler(1, rank) for rank in range(4))


def test_a_filler_counts_for_nothing_and_pairs_cannot_be_one() -> None:
    import torch

    batch = {"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3)}
    blank([batch])
    assert batch["labels"].tolist() == [[-100, -100, -100]]
    with pytest.raises(UserError, match="pairs cannot be left out"):
        blank([{"chosen_ids": torch.ones(1, 3)}])


def test_the_order_is_the_samplers_own() -> None:
    class Backwards:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter([3, 2, 1, 0] if self.epoch else [0, 1, 2, 3])

    dealt = Dealt(Backwards(), batch_size=4, micro=1, world_size=2)
    assert list(dealt) == [[0], [1], [2], [3]]
    dealt.set_epoch(1)
    assert list(dealt) == [[3], [2], [1], [0]]
