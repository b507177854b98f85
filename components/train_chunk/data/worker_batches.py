"""The batches of some of a run's virtual workers, in the order in which one process takes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import Sampler


class Batches(Protocol):
    """The micro-batches of all workers in turn: each round has one for each of them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[list[int]]: ...


class WorkerBatches(Sampler[list[int]]):
    """Of each optimizer step the micro-batches of the own workers, worker after worker.

    It names no batch size, so that Accelerate, which takes the process for the only one, cuts nothing off what is
    gathered in a loader's last batch: that would be another one in each process.

    Args:
        batches: Those of all workers.
        workers: How many there are.
        own: The numbers of this process's.
        passes: Micro-batches of each worker in a step; the last step of a pass over the rows may have fewer.
    """

    def __init__(self, batches: Batches, *, workers: int, own: range, passes: int) -> None:
        self.batches = batches
        self._workers, self._own, self._passes = workers, own, passes

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order, where it is one of epochs."""
        inner: Any = self.batches if hasattr(self.batches, "set_epoch") else getattr(self.batches, "sampler", None)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches) // self._workers * len(self._own)

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batches)
        while step := list(itertools.islice(batches, self._passes * self._workers)):
            for worker in self._own:
                yield from step[worker :: self._workers]
