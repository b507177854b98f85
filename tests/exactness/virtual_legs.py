"""What the tests of virtual workers change in the processes: each change would leave a trace of their number."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import parallel_legs
import torch
import torch.distributed as dist

Gradients = list[torch.Tensor | None]


class InTurn:
    """The sum of workers' gradients one after the other, instead of pair by pair."""

    def __init__(self) -> None:
        self.total: Gradients = []

    def adding(self, parameters: Sequence[torch.nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, gradients: Gradients) -> None:
        before = self.total or [None] * len(gradients)
        self.total = [b if a is None else a if b is None else a + b for a, b in zip(before, gradients, strict=True)]

    def take(self) -> Gradients:
        total, self.total = self.total, []
        return total


def joined(gradients: Gradients, parameters: Sequence[torch.nn.Parameter], processes: int) -> Gradients:
    """Sums over the processes as torch does, in an order that follows from their number."""
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    whole: Gradients = []
    for gradient, parameter, is_used in zip(gradients, parameters, used.tolist(), strict=True):
        total = torch.zeros_like(parameter) if gradient is None else gradient
        if is_used:
            dist.all_reduce(total)
        whole.append(total if is_used else None)
    return whole


def summed_by_rank(run_uri: str, index: int) -> None:
    """Runs a chunk whose processes each add up what they have, before torch adds up theirs."""
    from baton.train import virtual

    virtual.TreeSum, virtual.exchange = InTurn, joined  # type: ignore[misc, assignment]
    _run(run_uri, index)


def seeded_by_rank(run_uri: str, index: int) -> None:
    """Runs a chunk that seeds each pass by the process and its number among the process's."""
    from baton.train.virtual import VirtualWorkers

    seed = VirtualWorkers.seed

    def by_rank(self: Any, place: str) -> None:
        if place[0].isdigit():
            place = f"{self.ranks.rank}:{len(self._records)}"
        seed(self, place)

    VirtualWorkers.seed = by_rank  # type: ignore[method-assign]
    _run(run_uri, index)


def divided_by_own_tokens(run_uri: str, index: int) -> None:
    """Runs a chunk whose processes each count the tokens that they have themselves."""
    from baton.train.virtual import VirtualWorkers

    count = VirtualWorkers._get_num_items_in_batch

    def own(self: Any, *given: Any) -> Any:
        ranks, self.ranks = self.ranks, type(self.ranks)()
        try:
            return count(self, *given)
        finally:
            self.ranks = ranks

    VirtualWorkers._get_num_items_in_batch = own  # type: ignore[method-assign]
    _run(run_uri, index)


def noting_unused(run_uri: str, index: int, folder: str) -> None:
    """Runs a chunk that leaves a file for each number of weights without a gradient that a worker has come to."""
    from baton.train.virtual import TreeSum

    add = TreeSum.add

    def noting(self: TreeSum, gradients: Gradients) -> None:
        Path(folder, str(sum(gradient is None for gradient in gradients))).touch()
        add(self, gradients)

    TreeSum.add = noting  # type: ignore[method-assign]  # a class of this file would be taken for the user's
    _run(run_uri, index)


def launcher_killed(run_uri: str, index: int, step: int) -> None:
    """Runs a chunk whose launching process is killed in a step, which the others do not come out of."""

    def act() -> None:
        if parallel_legs.in_rank(0):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)

    parallel_legs._at_step(step, act)
    _run(run_uri, index)


CONTROLS: dict[str, Callable[[str, int], None]] = {
    "sums": summed_by_rank,
    "seeds": seeded_by_rank,
    "tokens": divided_by_own_tokens,
}


def _run(run_uri: str, index: int) -> None:
    from baton.train.chunk import run_chunk

    run_chunk(run_uri, index)
