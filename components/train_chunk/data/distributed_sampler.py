"""Rows distributed to ranks: each optimizer step has the rows that it has with one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils.data import Sampler

from baton.components.shared.core.labels import IGNORED

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard


class Order(Protocol):
    """An order of rows, whose length is known."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class DistributedBatches(Sampler[list[int]]):
    """The micro-batches of all ranks in turn, of which Accelerate's shard takes each rank's own.

    By itself, Accelerate fills up a last step that does not divide evenly with rows of the first. Here it is split
    over the ranks instead, as evenly as possible; where `micro` is 1, some then have one row more than that. A rank for
    which no row is left has one whose labels count for nothing; see `is_filler`.

    Where the loss is a mean over rows, `shares` tells what each pass counts.

    Args:
        sampler: The order of rows.
        batch_size: Rows of an optimizer step.
        micro: Rows of a forward pass.
        world_size: Number of processes.
    """

    def __init__(self, sampler: Order, *, batch_size: int, micro: int, world_size: int) -> None:
        self.sampler = sampler
        self.full = batch_size
        self.micro = micro
        self.world_size = world_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order, where it is one of epochs."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        steps, rest = divmod(len(self.sampler), self.full)
        return (steps * self._rounds(self.full) + self._rounds(rest)) * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in self.sampler:
            rows.append(row)
            if len(rows) == self.full:
                yield from self._pieces(rows)
                rows = []
        yield from self._pieces(rows)

    def is_filler(self, step: int, rank: int) -> bool:
        """Tells whether a rank has no row in a step of the pass, counted from 0."""
        steps, rest = divmod(len(self.sampler), self.full)
        return step == steps and rank >= rest

    def shares(self, step: int, rank: int) -> list[float]:
        """Returns what the mean of each of a rank's passes counts, so that all rows of a step count as much.

        Args:
            step: Step of the pass over the rows, counted from 0.
            rank: Number of the rank.
        """
        steps, rest = divmod(len(self.sampler), self.full)
        num_rows = rest if step == steps else self.full
        pieces = list(self._pieces(list(range(num_rows))))[rank :: self.world_size]
        counted = [0 if self.is_filler(step, rank) else len(piece) for piece in pieces]
        # Gradients are then averaged over ranks and passes, which takes both factors away again.
        return [rows * self.world_size * len(pieces) / num_rows for rows in counted]

    def _rounds(self, num_rows: int) -> int:
        """Returns how many forward passes of each rank a step of so many rows has."""
        if num_rows < self.world_size:
            return min(num_rows, 1)
        return min(-(-num_rows // (self.micro * self.world_size)), num_rows // self.world_size)

    def _pieces(self, rows: list[int]) -> Iterator[list[int]]:
        if len(rows) < self.world_size:
            yield from ([row] for row in rows)
            yield from ([rows[0]] for _ in range(self.world_size - len(rows) if rows else 0))
            return
        pieces = self._rounds(len(rows)) * self.world_size
        for number in range(pieces):
            yield rows[number * len(rows) // pieces : (number + 1) * len(rows) // pieces]


def distribute(loader: DataLoaderShard, *, batch_size: int, micro: int, world_size: int) -> DistributedBatches:
    """Has a loader that Accelerate prepared for one of several ranks draw its rows from `DistributedBatches`."""
    shard = loader.batch_sampler
    batches = DistributedBatches(shard.batch_sampler.sampler, batch_size=batch_size, micro=micro, world_size=world_size)
    # Every step has as many pieces for one rank as for another, so that nothing is left for Accelerate to fill up.
    shard.batch_sampler, shard.batch_size, shard.even_batches = batches, None, False
    return batches


def follow_epochs(loader: DataLoaderShard) -> None:
    """Has the epoch reach the sampler of a loader for one of several ranks, also where first batches are skipped.

    Then there is one layer more around the sampler than Trainer and Accelerate look through, and a rank that resumes
    in a later epoch would take the order of the first.
    """
    shard = loader.batch_sampler
    inner = shard.batch_sampler
    sampler = inner if hasattr(inner, "set_epoch") else inner.sampler
    if hasattr(sampler, "set_epoch"):
        shard.set_epoch = sampler.set_epoch


def blank(batches: list[dict[str, torch.Tensor]]) -> None:
    """Has the filler rows of a rank that has no others count for nothing."""
    for batch in batches:
        batch["labels"].fill_(IGNORED)


@contextlib.contextmanager
def uneven(accelerator: Accelerator) -> Iterator[None]:
    """Has an accelerator gather rows of which ranks have different numbers, as torch does not."""
    gather = accelerator.gather

    def gathered(rows: object) -> object:
        if not isinstance(rows, torch.Tensor) or rows.dim() == 0:
            return gather(rows)
        # Two gathers in all ranks alike: how many rows each has, then the rows, filled up to the most.
        counts = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        filled = torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(counts) - len(rows)))
        pieces = gather(filled).split(max(counts))
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])

    accelerator.gather = gathered
    try:
        yield
    finally:
        # The instance's own; the class's is seen again.
        del accelerator.gather
