"""The processes that train a chunk together, as torch's launcher numbers them; alone, everything here is trivial."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from components.shared.errors import BatonError

T = TypeVar("T")

PATIENCE = 7200.0
"""Seconds for which a process waits for the others in a collective call: while the first one downloads, or waits for
the store. Who hangs in training is seen earlier, by `pulse`; a process that ends is seen at once."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its chunk.

    Attributes:
        rank: Its number among all.
        size: How many there are.
        local_rank: Its number on its machine.
        node: Number of its machine.
        nodes: How many machines there are.
        launched: Whether torch's launcher started it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    nodes: int = 1
    launched: bool = False

    @classmethod
    def here(cls) -> Ranks:
        """Reads the environment that torch's launcher gives to each process."""
        if "LOCAL_RANK" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
        rank, size, local_rank, node, nodes = (int(os.environ[name]) for name in names)
        return cls(rank, size, local_rank, node, nodes, launched=True)

    @property
    def is_first(self) -> bool:
        """Whether this one speaks for all: it tells, records and commits."""
        return self.rank == 0

    @property
    def leads_node(self) -> bool:
        """Whether this one downloads for its machine, and watches for its end."""
        return self.local_rank == 0

    def join(self, *, on_gpu: bool) -> None:
        """Meets the others. Accelerate takes this group for its own.

        Args:
            on_gpu: Whether each has a CUDA device of its own.
        """
        if self.size == 1:
            return
        import torch
        import torch.distributed

        if on_gpu:
            torch.cuda.set_device(self.local_rank)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=PATIENCE)
        )

    def leave(self) -> None:
        """Parts from the others, with whom nothing is under way any more."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed

        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found

    def rows(self, numbers: list[float]) -> list[list[float]]:
        """Returns the numbers of all processes, as many from each, by rank: cheaper than `gather`."""
        if self.size == 1:
            return [numbers]
        import torch
        import torch.distributed

        ours = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(ours) for _ in range(self.size)]
        torch.distributed.all_gather(found, ours)
        return [row.tolist() for row in found]

    def first_says(self, work: Callable[[], T]) -> T:
        """Has the first process do something, and returns to all what it found or raises in all what it raised."""
        return self._said(work, 0 if self.is_first else None, 0)

    def node_says(self, work: Callable[[], T]) -> T:
        """Has one process of each machine do something, and returns to all of that machine what it found.

        Raises:
            BatonError: on some machine it did not succeed; all raise the first such error.
        """
        return self._said(work, self.node if self.leads_node else None, self.node)

    def _said(self, work: Callable[[], T], role: int | None, heard: int) -> T:
        """Has those with a role do something, and returns what the one of the role that is heard found."""
        if self.size == 1:
            return work()
        value, failure = None, None
        if role is not None:
            try:
                value = work()
            except BatonError as error:
                failure = error
        said = [row for row in self.gather((role, value, failure)) if row[0] is not None]
        for _, _, failed in said:
            if failed:
                raise failed
        found: Any = next(value for role, value, _ in said if role == heard)
        return found  # type: ignore[no-any-return]
