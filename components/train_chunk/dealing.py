"""Rows dealt to processes: each optimizer step has the rows that it has with one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from components.shared.errors import UserError
from components.shared.labels import IGNORED


class Dealt(Sampler[list[int]]):
    """The micro-batches of all processes in turn, of which Accelerate's shard takes each process's own.

    Left to themselves, Accelerate fills up a last step that does not come out even with rows of the first. Here it is
    split over the processes instead, as evenly as it goes; where `micro` is 1, some then have one row more than that.
    A process for which there is no row at all has one whose labels count for nothing; see `is_filler`.

    Args:
        sampler: The order of rows.
        batch_size: Rows of an optimizer step.
        micro: Rows of a forward pass.
        world_size: Number of processes.
    """

    def __init__(self, sampler: Any, *, batch_size: int, micro: int, world_size: int) -> None:
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
        """Tells whether a process has no row of its own in a step of the pass, counted from 0."""
        steps, rest = divmod(len(self.sampler), self.full)
        return step == steps and rank >= rest

    def _rounds(self, num_rows: int) -> int:
        """Returns how many forward passes of each process a step of so many rows has."""
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


def deal(loader: Any, *, batch_size: int, micro: int, world_size: int) -> Dealt:
    """Has a loader that Accelerate prepared for one of several processes take its rows as `Dealt` deals them."""
    shard = loader.batch_sampler
    dealt = Dealt(shard.batch_sampler.sampler, batch_size=batch_size, micro=micro, world_size=world_size)
    shard.batch_sampler, shard.batch_size, shard.even_batches = dealt, None, False
    return dealt


def blank(batches: list[dict[str, Any]]) -> None:
    """Has the rows of a process that has none of its own count for nothing.

    Raises:
        UserError: they have no labels that could be left out: they are pairs.
    """
    for batch in batches:
        if "labels" not in batch:
            raise UserError(
                "the last step of a pass has fewer rows than there are processes, and pairs cannot be left out of one.",
                remedy="Change training.batch_size or data.max_samples a little.",
            )
        batch["labels"].fill_(IGNORED)
