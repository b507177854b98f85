"""The ranks that train a chunk together, as torch's launcher numbers them; a world of one rank needs no torch."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from baton.errors import BatonError

T = TypeVar("T")

PATIENCE = 7200.0
"""Seconds that a rank waits for the others in a collective call, as while the first one downloads or the store fails.

The watchdog names a rank that hangs in training earlier; one that ends is noticed at once.
"""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its chunk; by default a world of one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    nodes: int = 1
    launched: bool = False

    @classmethod
    def here(cls) -> Ranks:
        if "LOCAL_RANK" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
        rank, size, local_rank, node, nodes = (int(os.environ[name]) for name in names)
        return cls(rank, size, local_rank, node, nodes, launched=True)

    @property
    def is_first(self) -> bool:
        """Whether this one reports, records and commits for all."""
        return self.rank == 0

    @property
    def leads_node(self) -> bool:
        """Whether this one downloads for its machine, and watches for its preemption."""
        return self.local_rank == 0

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Lets Accelerate, set up in the block, take this process for one that trains alone."""
        names = ("LOCAL_RANK", "WORLD_SIZE")
        kept = {name: os.environ.pop(name) for name in names if name in os.environ}
        warned = logging.getLogger("transformers.training_args")
        level = warned.level
        warned.setLevel(logging.ERROR)  # it warns of the process group that it is not told of
        try:
            yield
        finally:
            warned.setLevel(level)
            os.environ.update(kept)

    def join(self, *, on_gpu: bool) -> None:
        """Joins the default process group, which Accelerate then uses; on a GPU each rank has its own device."""
        if self.size == 1:
            return
        import torch
        import torch.distributed

        if on_gpu:
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())  # see `launch.pin_device`
        # On GPUs both: values gathered after each step are on the CPU, which NCCL cannot reach.
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=PATIENCE)
        )

    def leave(self) -> None:
        """Destroys the process group, once all ranks are here."""
        if self.size > 1:
            import torch.distributed

            # All share the first one's folder, and upstream looks into it once more at its end: the first must not
            # remove it before.
            self.gather(None)
            torch.distributed.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in their order; each must call it."""
        if self.size == 1:
            return [value]
        import torch.distributed

        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return cast(list[T], values)

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Gathers as many numbers from each rank: cheaper than `gather`."""
        if self.size == 1:
            return [numbers]
        import torch
        import torch.distributed

        ours = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(ours) for _ in range(self.size)]
        torch.distributed.all_gather(rows, ours)
        return [row.tolist() for row in rows]

    def on_first(self, work: Callable[[], T]) -> T:
        """Runs `work` in the first rank alone, and returns its result, or raises its error, in all."""
        return self._run(work, 0 if self.is_first else None, 0)

    def on_node_leaders(self, work: Callable[[], T]) -> T:
        """Runs `work` in one rank of each machine and returns its result there; all raise the first `BatonError`."""
        return self._run(work, self.node if self.leads_node else None, self.node)

    def _run(self, work: Callable[[], T], role: int | None, wanted: int) -> T:
        if self.size == 1:
            return work()
        value: T | None = None
        failure: BatonError | None = None
        if role is not None:
            try:
                value = work()
            except BatonError as error:  # the others wait in `gather`: they are told instead of left there
                failure = error
        # Ranks without the role wait here for as long as the work takes. Any other error ends this process before, and
        # the launcher then ends the others.
        results = [row for row in self.gather((role, value, failure)) if row[0] is not None]
        for _, _, theirs in results:
            if theirs:
                raise theirs
        return cast(T, next(value for role, value, _ in results if role == wanted))
