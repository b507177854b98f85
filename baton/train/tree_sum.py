"""Sums of gradients whose order is a binary tree over the virtual workers, whichever processes hold them.

Floating-point addition is commutative, but not associative: a sum has the same bits wherever its pairs are the same. A
process adds up its own workers, which are neighbours, pair by pair; then the processes' sums are added in the same way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from baton.errors import BatonError

Gradients = list[torch.Tensor | None]
"""One for each parameter; None where it was not used, which counts as zero."""

BUCKET = 2**23
"""Bytes that are exchanged at once."""
LARGE = 2**20
"""Bytes from which on a gradient is exchanged where it is: copying it would cost more than a call of its own."""


class TreeSum:
    """The sum of neighbouring workers' gradients, which come one after the other; log₂ of them are held."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, Gradients]] = []
        self._added: set[int] = set()

    @contextlib.contextmanager
    def adding(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Adds gradients of a worker's last backward pass to a sum that waits for them, each as soon as it is there.

        So the worker's are not all there at once, beside that sum. `add` must follow, once, before the next worker's.

        Args:
            parameters: Those that are trained; each comes to its gradient once in the pass.
        """
        if not self._sums or self._sums[-1][0]:
            yield
            return
        before = self._sums[-1][1]

        def add(index: int, parameter: torch.Tensor) -> None:
            if index in self._added:  # a sum in two parts has another order than where nothing waits for it
                raise BatonError(
                    "a backward pass comes to a parameter's gradient twice, as reentrant checkpoints do.",
                    remedy="Let them not be reentrant, or leave out training.parallel.virtual_workers.",
                )
            before[index], parameter.grad = _plus(before[index], parameter.grad), None
            self._added.add(index)

        hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(add, index))
            for index, parameter in enumerate(parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, gradients: Gradients) -> None:
        """Adds a worker's gradients, those that `adding` has left; they are changed in place."""
        level = 0
        while self._sums and self._sums[-1][0] == level:
            _, before = self._sums.pop()
            for index, gradient in enumerate(gradients):
                if index not in self._added:
                    before[index] = _plus(before[index], gradient)
            gradients, self._added = before, set()
            level += 1
        self._sums.append((level, gradients))

    def take(self) -> Gradients:
        """Returns the sum of a power of two of workers, and begins anew."""
        ((_, total),) = self._sums
        self._sums = []
        return total


def _plus(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        alone = right if left is None else left
        # As where the other process has the zeros of a parameter that it did not use (`exchange`): −0 + 0 is 0.
        return None if alone is None else alone.add_(0.0)
    return left.add_(right)


def exchange(gradients: Gradients, parameters: Sequence[torch.nn.Parameter], processes: int) -> Gradients:
    """Returns the sum of all processes' gradients, as a tree over their ranks; all must call it.

    Each gets one part of all gradients from each other, adds them up, and gives the sum to all: as many bytes as a ring
    sends, in an order that is known.

    Args:
        gradients: This process's, for each of the parameters; changed in place.
        parameters: Those that are trained.
        processes: How many there are, a power of two.
    """
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    whole = [
        (torch.zeros_like(parameter) if gradient is None else gradient) if is_used else None
        for gradient, parameter, is_used in zip(gradients, parameters, used.tolist(), strict=True)
    ]
    scattered: _Bucket | None = None
    gathered: _Bucket | None = None
    # All processes have the same buckets, as they agree on what is used. Three are there at once: the next is sent
    # while one is added up and the sum of the one before arrives; the last two rounds send nothing.
    for tensors in (*_parts([x for x in whole if x is not None], processes), None, None):
        bucket = _Bucket(tensors, processes) if tensors else None
        if scattered:
            scattered.add_up()
        if gathered:
            gathered.spread()
        scattered, gathered = bucket, scattered
    return whole


def _parts(gradients: Sequence[torch.Tensor], processes: int) -> Iterator[list[torch.Tensor]]:
    """Yields what is exchanged together: slices of a large gradient one by one, small gradients of one kind."""
    for _, alike in groupby(gradients, lambda gradient: (gradient.dtype, gradient.device)):
        small: list[torch.Tensor] = []
        size = 0
        for gradient in alike:
            if gradient.nbytes >= LARGE and gradient.is_contiguous() and gradient.numel() % processes == 0:
                length = BUCKET // gradient.element_size()
                yield from ([piece] for piece in gradient.view(-1).split(length))
                continue
            if small and size + gradient.nbytes > BUCKET:
                yield small
                small, size = [], 0
            small.append(gradient)
            size += gradient.nbytes
        if small:
            yield small


class _Bucket:
    """Gradients that are exchanged together, as one row whose length is a multiple of the processes."""

    def __init__(self, gradients: list[torch.Tensor], processes: int) -> None:
        self._gradients, self._processes = gradients, processes
        lengths = [gradient.numel() for gradient in gradients]
        self._views: Sequence[torch.Tensor] = ()
        if len(gradients) == 1 and gradients[0].is_contiguous() and lengths[0] % processes == 0:
            self._row = gradients[0].view(-1)
        else:
            self._row = gradients[0].new_empty(-(-sum(lengths) // processes) * processes)
            self._views = self._row[: sum(lengths)].split(lengths)
            torch._foreach_copy_(list(self._views), [gradient.reshape(-1) for gradient in gradients])
        self._received = torch.empty_like(self._row)
        self._work = dist.all_to_all_single(self._received, self._row, async_op=True)

    def add_up(self) -> None:
        """Adds up this process's part of all gradients, and begins to give it to all."""
        self._work.wait()
        sums = list(self._received.chunk(self._processes))
        while len(sums) > 1:
            sums = [left.add_(right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
        self._work = dist.all_gather_single(self._row, sums[0], async_op=True)

    def spread(self) -> None:
        """Waits for the sums."""
        self._work.wait()
        for gradient, view in zip(self._gradients if self._views else (), self._views, strict=True):
            gradient.copy_(view.view_as(gradient))
