"""What the tests of the guard run in processes of their own."""

from __future__ import annotations

import functools
from typing import Any

from tests.support import without


def in_a_pod(run_uri: str, index: int, leave_out: tuple[str, ...] = ()) -> None:
    """Runs a chunk as its component does: what finds a step to skip is followed by a process that skips it."""
    from baton.train import supervisor
    from baton.train.chunk import run_chunk

    without.install()
    supervisor.run(run_uri, index, functools.partial(run_chunk, leave_out=leave_out))


def planted(run_uri: str, index: int) -> None:
    """The same with steps that are spoilt, where no class of the recipe's may do it."""
    from baton.train.weighing import WeighedRows
    from tests.resume import own

    compute = WeighedRows.compute_loss
    WeighedRows.compute_loss = lambda self, *given, **named: own.planted(self, compute(self, *given, **named))  # type: ignore[method-assign]
    in_a_pod(run_uri, index)


def drawing(run_uri: str, index: int) -> None:
    """Runs a chunk in which a skipped step draws a random number."""
    import torch

    from baton.train.chunk import run_chunk
    from baton.train.guard import Guarded

    def skip_step(self: Any, *arguments: Any) -> None:
        super(Guarded, self).skip_step(*arguments)
        torch.rand(())

    Guarded.skip_step = skip_step  # type: ignore[method-assign]
    run_chunk(run_uri, index)
