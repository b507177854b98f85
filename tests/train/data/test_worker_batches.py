"""Batches dealt to virtual workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from baton.train.samplers import DistributedBatches
from baton.train.virtual import WorkerBatches

WORKERS, MICRO, PASSES = 4, 2, 3
FULL = WORKERS * MICRO * PASSES


class Turning:
    """Rows in their order, each epoch from another one on."""

    epoch = 0

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return ((row + self.epoch) % self.num_rows for row in range(self.num_rows))


def dealt(num_rows: int, processes: int, rank: int) -> WorkerBatches:
    batches = DistributedBatches(Turning(num_rows), batch_size=FULL, micro=MICRO, world_size=WORKERS)
    share = WORKERS // processes
    own = range(rank * share, (rank + 1) * share)
    return WorkerBatches(batches, workers=WORKERS, own=own, passes=PASSES)


def steps(batches: WorkerBatches, of_each: int) -> list[list[list[int]]]:
    """A process's batches, by step."""
    found = list(batches)
    assert len(found) == len(batches)
    return [found[at : at + of_each] for at in range(0, len(found), of_each)]


@pytest.mark.parametrize("num_rows", [FULL, 2 * FULL, 2 * FULL + 1, FULL + 3, FULL + 7, FULL + 17, 3])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_one_after_the_other_have_what_one_has(processes: int, num_rows: int) -> None:
    """In each step, and each as many as the others."""
    whole = steps(dealt(num_rows, 1, 0), WORKERS * PASSES)
    parts = [steps(dealt(num_rows, processes, rank), WORKERS * PASSES // processes) for rank in range(processes)]
    assert [list(itertools.chain(*step)) for step in zip(*parts, strict=True)] == whole
    assert all(len({len(of) for of in step}) == 1 for step in zip(*parts, strict=True))


def test_a_worker_has_the_rows_of_a_process_and_one_worker_follows_the_other() -> None:
    batches = list(DistributedBatches(Turning(FULL), batch_size=FULL, micro=MICRO, world_size=WORKERS))
    (step,) = steps(dealt(FULL, 1, 0), WORKERS * PASSES)
    assert step == [batch for worker in range(WORKERS) for batch in batches[worker::WORKERS]]
    assert step[:PASSES] == [[0, 1], [8, 9], [16, 17]]


def test_a_last_step_of_fewer_passes_is_a_step_of_its_own() -> None:
    first, last = steps(dealt(FULL + 5, 2, 1), 2 * PASSES)
    assert len(first) == 2 * PASSES
    assert last == [[26], [27, 28]], "one pass of each worker"


def test_the_epoch_reaches_the_sampler() -> None:
    batches = dealt(FULL, 4, 1)
    before = list(batches)
    batches.set_epoch(1)
    assert list(batches) == [[row + 1 for row in batch] for batch in before]
