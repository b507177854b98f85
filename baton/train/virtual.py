"""Virtual workers: a step cut for a fixed number of them, whichever processes make their passes.

The run is that of one process that makes all workers' passes in order. Each process makes its own workers' passes and
exchanges token counts, gradients and logged values in that order. See docs/internals/multi-gpu.md.

Gradients are added up as a binary tree over the workers. Floating-point addition is commutative, but not associative:
a sum has the same bits wherever its pairs are the same. A process adds up its own workers, which are neighbours, pair
by pair; then the processes' sums are added in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_pt_utils import nested_detach

from baton.errors import BatonError, UserError
from baton.models import rng
from baton.train.samplers import DistributedBatches, blank
from baton.train.weighing import Batch, MicroBatchResult, WeighedRows, add_micro_batch, record_micro_batch


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The passes of a step as one process would count that makes them all; each of its workers has `rounds`."""

    own: range
    rounds: int
    total: int  # passes of all workers that have rows
    fillers: frozenset[int] = frozenset()  # workers for which no row is left
    # Weight of each of a worker's passes, so that all rows count alike; empty where the loss is a sum.
    shares: Mapping[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, own: range, rounds: int, workers: int) -> MicroBatches:
        return cls(own=own, rounds=rounds, total=rounds * workers)

    @classmethod
    def of_rows(cls, own: range, rounds: int, pieces: DistributedBatches, step: int, *, sums: bool) -> MicroBatches:
        """`step` counts from 0 in the pass over the rows; `sums` tells whether the loss is a sum."""
        workers = pieces.world_size
        fillers = frozenset(worker for worker in range(workers) if pieces.is_filler(step, worker))
        total = (workers - len(fillers)) * rounds
        shares = {} if sums else {x: [y * total / (rounds * workers) for y in pieces.shares(step, x)] for x in own}
        return cls(own=own, rounds=rounds, total=total, fillers=fillers, shares=shares)

    def at(self, position: int) -> tuple[int, int]:
        """Returns the worker of this process's pass at a position, and the pass's number among the worker's."""
        return self.own[position // self.rounds], position % self.rounds

    def __len__(self) -> int:
        return len(self.own) * self.rounds


class Batches(Protocol):
    """The micro-batches of all workers in turn: each round has one for each of them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[list[int]]: ...


class WorkerBatches(Sampler[list[int]]):
    """The own workers' micro-batches of each optimizer step, worker after worker; the last step may have fewer."""

    # No `batch_size`: Accelerate takes this process for the only one, and would cut rows gathered in a loader's last
    # batch, which is another one in each process.

    def __init__(self, batches: Batches, *, workers: int, own: range, passes: int) -> None:
        self.batches = batches
        self._workers, self._own, self._passes = workers, own, passes

    def set_epoch(self, epoch: int) -> None:
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


class VirtualWorkers(WeighedRows):
    """Mixin: makes the passes of this process's share of a run's virtual workers, without a trace of the sharing.

    Each process is told that it trains alone. Values that depend on others' passes are exchanged in passes' order.
    """

    _own: range | None = None  # this process's workers; None before training, as in an evaluation alone
    _pieces: DistributedBatches | None = None
    _flos = 0.0
    _foreseen: Sequence[MicroBatchResult] = ()

    def seed(self, place: str) -> None:
        """Seeds all generators by the run's seed, the step and a place in it: the same in whichever process."""
        drawn = hashlib.sha256(f"{self.args.seed}:{self.state.global_step}:{place}".encode()).digest()
        rng.seed(int.from_bytes(drawn[:4], "big"))

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        workers, training = self.recipe.parallel.virtual_workers, self.recipe.training
        assert workers
        _require_no_batch_statistics(self.model)
        share = workers // self.ranks.size
        self._own = range(self.ranks.rank * share, (self.ranks.rank + 1) * share)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._sum = TreeSum()
        batches = loader.batch_sampler
        if not training.spec.generates:
            micro = self.args.per_device_train_batch_size
            self._pieces = batches = DistributedBatches(
                batches.sampler, batch_size=training.batch_size, micro=micro, world_size=workers
            )
        dealt = WorkerBatches(batches, workers=workers, own=self._own, passes=self.recipe.gradient_accumulation_steps)
        vars(loader.base_dataloader)["batch_sampler"] = dealt  # torch refuses to set it after Accelerate made it
        return loader

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        samples = super().get_batch_samples(*arguments, **options)
        self.seed("begin")  # for callbacks: the generators' state depends on who made which pass
        return samples

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor | None:
        # transformers 5.23 counts the tokens of this process alone.
        count: torch.Tensor | None = super()._get_num_items_in_batch(batch_samples, device)
        if not self._fetches or count is None or self.ranks.size == 1:
            return count
        return torch.full_like(count, int(sum(row[0] for row in self.ranks.gather_numbers([float(count)]))))

    def begin_step(self, batches: list[Batch]) -> None:
        assert self._own is not None
        self._records: list[MicroBatchResult] = []
        rounds = len(batches) // len(self._own)
        if self._pieces is None:
            self._passes = MicroBatches.of(self._own, rounds, self.recipe.workers)
            return
        step = self.state.global_step % -(-len(self.train_dataset) // self._pieces.full)
        sums = self.recipe.training.spec.counts_tokens
        self._passes = MicroBatches.of_rows(self._own, rounds, self._pieces, step, sums=sums)
        fills = [self._passes.at(position)[0] in self._passes.fillers for position in range(len(batches))]
        if sums:
            blank(list(itertools.compress(batches, fills)))
        else:
            self.note_whole([batch for batch, is_filler in zip(batches, fills, strict=True) if not is_filler])

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Makes a pass, apart from earlier ones; returns the step's loss after its last pass, else 0."""
        compute = functools.partial(super().training_step, model, inputs, num_items_in_batch)
        position, self._flos = len(self._records), 0.0
        worker, number = self._passes.at(position)
        is_last = number == self._passes.rounds - 1
        if worker in self._passes.fillers:
            self.enter_training(model)
            for doing in self.watchdog.beats_of_a_pass:
                self.watchdog.heartbeat(doing)
            self._records.append(MicroBatchResult(outputs=0.0))
        else:
            self.seed(f"{worker}:{number}")
            self._shares = iter(self._passes.shares[worker][number : number + 1] if self._passes.shares else ())
            self.current_gradient_accumulation_steps = self._passes.total
            with self._sum.adding(self._trained) if is_last else contextlib.nullcontext():
                made = record_micro_batch(self, "train", compute)
            made.outputs, made.flos = made.outputs.item(), float(super().floating_point_ops(inputs))
            self._records.append(made)
        if is_last:
            self._sum.add([parameter.grad for parameter in self._trained])
            for parameter in self._trained:
                parameter.grad = None
        return torch.tensor(self._end_step() if position == len(self._passes) - 1 else 0.0, device=self.args.device)

    def skip_step(self, model: nn.Module, inputs: Any) -> None:
        super().skip_step(model, inputs)
        # State of the generators after the step's passes, whichever process makes them.
        self.seed("end")

    def _end_step(self) -> float:
        """Gives each process the gradients and logged values of all; returns the loss."""
        gradients = self._sum.take()
        if self.ranks.size > 1:
            gradients = exchange(gradients, self._trained, self.ranks.size)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        loss = 0.0
        # Ranks hold neighbouring workers: rank by rank is the order of passes.
        for made in (made for records in self.ranks.gather(self._records) for made in records):
            loss += made.outputs
            self._flos += made.flos
            add_micro_batch(self, "train", made)
        self.seed("end")
        return loss

    def is_world_process_zero(self) -> bool:
        return bool(super().is_world_process_zero()) and self.writes_part

    def floating_point_ops(self, inputs: Batch) -> float:
        return self._flos

    def write_checkpoint(self, model: nn.Module, trial: object) -> None:
        self.seed("checkpoint")
        # The state is the same in all.
        if self.ranks.is_first:
            super().write_checkpoint(model, trial)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().evaluation_loop(*arguments, **options)
        finally:
            self._foreseen = ()

    def begin_evaluation(self, dataloader: Any, *, prediction_loss_only: bool) -> None:
        super().begin_evaluation(dataloader, prediction_loss_only=prediction_loss_only)
        size = self.ranks.size
        if size == 1 or not self.is_in_train:
            return
        # Each batch in one of the processes, beforehand; `prediction_step` then has every result in all.
        self.model.eval()
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        ours, number = [], -1
        for number, inputs in enumerate(dataloader):
            if number % size == self.ranks.rank:
                compute = functools.partial(self.evaluate_batch, self.model, inputs, prediction_loss_only)
                ours.append(self._evaluated_batch(number, inputs, compute))
        rows = self.ranks.gather(ours)
        self._foreseen = [rows[at % size][at // size] for at in range(number + 1)]

    def prediction_step(self, model: Any, inputs: Any, *arguments: object, **options: object) -> Any:
        number = len(self._evaluated)
        if self._foreseen:
            made = self._foreseen[number]
        else:
            compute = functools.partial(self.evaluate_batch, model, inputs, *arguments, **options)
            made = self._evaluated_batch(number, inputs, compute)
        self.take_evaluation(made)
        # For metrics and callbacks: the generators' state depends on who evaluated the batch.
        self.seed(f"evaluated:{number}")
        return made.outputs

    def _evaluated_batch(self, number: int, inputs: Any, compute: Callable[[], Any]) -> MicroBatchResult:
        self.seed(f"evaluation:{number}")
        made = self.record_evaluation(inputs, compute)
        made.outputs = nested_detach(made.outputs)
        return made


def _require_no_batch_statistics(model: nn.Module) -> None:
    # Such buffers follow the rows that one process has seen.
    for name, layer in model.named_modules():
        if getattr(layer, "track_running_stats", False):
            raise UserError(
                f"layer {name} keeps statistics of the batches it sees, and each process sees its own.",
                remedy="Leave out training.parallel.virtual_workers.",
            )


Gradients = list[torch.Tensor | None]  # by parameter; None where it was not used, which counts as zero

BUCKET = 2**23  # bytes that are exchanged at once
LARGE = 2**20  # bytes from which a gradient is exchanged in place: copying it costs more than a call of its own


class TreeSum:
    """The sum of consecutive workers' gradients; log₂ of them are held."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, Gradients]] = []
        self._added: set[int] = set()

    @contextlib.contextmanager
    def adding(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Adds a worker's gradients to the sum that waits for them, each as soon as its backward pass has made it.

        So they are never all in memory with that sum. `add` must follow, once, before the next worker's.
        """
        if not self._sums or self._sums[-1][0]:
            yield
            return
        before = self._sums[-1][1]

        def add(index: int, parameter: torch.Tensor) -> None:
            if index in self._added:  # adding it in two parts is another order than adding it whole
                raise BatonError(
                    "a backward pass computes a parameter's gradient twice, as reentrant checkpoints do.",
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
        """Adds a worker's gradients that `adding` has left; they are changed in place."""
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
        """Returns the sum of a power of two of workers, and starts over."""
        ((_, total),) = self._sums
        self._sums = []
        return total


def _plus(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        alone = right if left is None else left
        # As with the zeros that `exchange` sends for a parameter that a process did not use: −0 + 0 is 0.
        return None if alone is None else alone.add_(0.0)
    return left.add_(right)


def exchange(gradients: Gradients, parameters: Sequence[torch.nn.Parameter], processes: int) -> Gradients:
    """Returns the sum of all processes' gradients, as a tree over their ranks; all must call it.

    Each gets one part of all gradients from each other, adds them up, and gives the sum to all: as many bytes as a ring
    sends, in a known order. This process's are changed in place; `processes` is a power of two.
    """
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    whole = [
        (torch.zeros_like(parameter) if gradient is None else gradient) if is_used else None
        for gradient, parameter, is_used in zip(gradients, parameters, used.tolist(), strict=True)
    ]
    scattered: _Bucket | None = None
    gathered: _Bucket | None = None
    # All processes agree on the used ones, so that all have the same buckets. Three are in flight: one is sent, the
    # second added up, and the third's sum arrives; the last two rounds send nothing.
    for tensors in (*_parts([x for x in whole if x is not None], processes), None, None):
        bucket = _Bucket(tensors, processes) if tensors else None
        if scattered:
            scattered.add_up()
        if gathered:
            gathered.spread()
        scattered, gathered = bucket, scattered
    return whole


def _parts(gradients: Sequence[torch.Tensor], processes: int) -> Iterator[list[torch.Tensor]]:
    """Yields units of exchange: slices of a large gradient one by one, small gradients of one kind."""
    for _, alike in itertools.groupby(gradients, lambda gradient: (gradient.dtype, gradient.device)):
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
        self._work.wait()
        for gradient, view in zip(self._gradients if self._views else (), self._views, strict=True):
            gradient.copy_(view.view_as(gradient))
