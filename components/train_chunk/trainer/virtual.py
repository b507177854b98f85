"""Virtual workers: a step is cut for so many of them, and the processes that share them leave no trace in the bits.

The run is that of one process that makes all workers' passes, one after the other. Each process is told that it is that
one, and makes the passes of its own workers; what depends on others' (the count of tokens, gradients, logged values) is
exchanged in the order of passes. See docs/parallel.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch

from baton.components.shared.core.errors import UserError
from baton.components.train_chunk.data import distributed_sampler
from baton.components.train_chunk.data.worker_batches import WorkerBatches
from baton.components.train_chunk.distributed.tree import TreeSum, exchange
from baton.components.train_chunk.trainer import passes
from baton.components.train_chunk.trainer.dealt_evaluation import Dealt
from baton.components.train_chunk.trainer.passes import Passes, Record

if TYPE_CHECKING:
    from torch import nn

Batch = dict[str, Any]
"""The tensors of a micro-batch."""


class Virtual(Dealt):
    """Mixin for a `Trainer`: makes the passes of this process's share of a run's virtual workers, if it has such."""

    _own: range | None = None
    _pieces: distributed_sampler.DistributedBatches | None = None
    _flos = 0.0

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """Returns the batches of this process's workers."""
        loader = super().get_train_dataloader()
        workers, training = self.recipe.parallel.virtual_workers, self.recipe.training
        if not workers:
            return loader
        _require_no_batch_statistics(self.model)
        share = workers // self.ranks.size
        self._own = range(self.ranks.rank * share, (self.ranks.rank + 1) * share)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._sum = TreeSum()
        batches = loader.batch_sampler
        if not training.spec.generates:
            micro = self.args.per_device_train_batch_size
            self._pieces = batches = distributed_sampler.DistributedBatches(
                batches.sampler, batch_size=training.batch_size, micro=micro, world_size=workers
            )
        dealt = WorkerBatches(batches, workers=workers, own=self._own, passes=self.recipe.gradient_accumulation_steps)
        vars(loader.base_dataloader)["batch_sampler"] = dealt  # torch lets nobody set it, and Accelerate has made it
        return loader

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """Returns the batches of a step."""
        samples = super().get_batch_samples(*arguments, **options)
        if self._own is not None:
            self.seed("begin")  # for callbacks: where the generators are now, depends on who made which pass
        return samples

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor | None:
        """Returns the tokens of a step, those of other processes too."""
        if self._own is not None and self._fetches:
            self._begin_step(batch_samples)
        count: torch.Tensor | None = super()._get_num_items_in_batch(batch_samples, device)
        if self._own is None or not self._fetches or count is None or self.ranks.size == 1:
            return count
        counts = self.ranks.gather_numbers([float(count)])
        return torch.full_like(count, int(sum(row[0] for row in counts)))

    def _begin_step(self, batch_samples: list[Batch]) -> None:
        assert self._own is not None
        self._records: list[Record] = []
        rounds = len(batch_samples) // len(self._own)
        if self._pieces is None:
            self._passes = Passes.of(self._own, rounds, self.recipe.workers)
            return
        step = self.state.global_step % -(-len(self.train_dataset) // self._pieces.full)
        sums = self.recipe.training.spec.counts_tokens
        self._passes = Passes.of_rows(self._own, rounds, self._pieces, step, sums=sums)
        fills = [self._passes.at(position)[0] in self._passes.fillers for position in range(len(batch_samples))]
        if sums:
            distributed_sampler.blank(list(itertools.compress(batch_samples, fills)))
        else:
            self.note_whole([batch for batch, is_filler in zip(batch_samples, fills, strict=True) if not is_filler])

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Makes a pass, apart from those before it; after the step's last, adds up what all workers have come to.

        Returns:
            The step's loss after its last pass, 0 after the others.
        """
        compute = functools.partial(super().training_step, model, inputs, num_items_in_batch)
        if self._own is None:
            alone: torch.Tensor = compute()
            return alone
        position, self._flos = len(self._records), 0.0
        worker, number = self._passes.at(position)
        is_last = number == self._passes.rounds - 1
        if worker in self._passes.fillers:
            model.train()  # as a pass begins; an evaluation may have been before it
            if hasattr(self.optimizer, "train"):
                self.optimizer.train()
            for doing in self.watchdog.signs_of_a_pass:
                self.watchdog.beat(doing)
            self._records.append(Record(outputs=0.0))
        else:
            self.seed(f"{worker}:{number}")
            self._shares = iter(self._passes.shares[worker][number : number + 1] if self._passes.shares else ())
            self.current_gradient_accumulation_steps = self._passes.total
            with self._sum.adding(self._trained) if is_last else contextlib.nullcontext():
                made = passes.record(self, "train", compute)
            made.outputs, made.flos = made.outputs.item(), float(super().floating_point_ops(inputs))
            self._records.append(made)
        if is_last:
            self._sum.add([parameter.grad for parameter in self._trained])
            for parameter in self._trained:
                parameter.grad = None
        return torch.tensor(self._end_step() if position == len(self._passes) - 1 else 0.0, device=self.args.device)

    def pass_over(self, model: nn.Module, inputs: Any) -> None:
        """Leaves the generators where the step's passes would, whoever makes which."""
        super().pass_over(model, inputs)
        if self._own is not None:
            self.seed("end")

    def _end_step(self) -> float:
        """Leaves each process with the gradients and logged values of all; returns the loss."""
        gradients = self._sum.take()
        if self.ranks.size > 1:
            gradients = exchange(gradients, self._trained, self.ranks.size)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        loss = 0.0
        # Ranks hold neighbouring workers, so theirs one after the other are in the order of passes.
        for made in (made for records in self.ranks.gather(self._records) for made in records):
            loss += made.outputs
            self._flos += made.flos
            passes.add(self, "train", made)
        self.seed("end")
        return loss

    def is_world_process_zero(self) -> bool:
        """Whether this process is the first; callbacks ask."""
        return bool(super().is_world_process_zero()) and self.writes_part

    def floating_point_ops(self, inputs: Batch) -> float:
        """Returns the operations of a pass; with virtual workers those of a step, after its last."""
        return float(super().floating_point_ops(inputs)) if self._own is None else self._flos

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Writes a checkpoint, of one process: the state is the same in all."""
        if self._own is not None:
            self.seed("checkpoint")
        super()._save_checkpoint(model, trial)

    def _write_checkpoint(self, model: nn.Module, trial: object) -> None:
        if self._own is None or self.ranks.is_first:
            super()._write_checkpoint(model, trial)


def _require_no_batch_statistics(model: nn.Module) -> None:
    """Raises an error for a model whose buffers follow the rows that a process has seen.

    Raises:
        UserError: it has such.
    """
    for name, layer in model.named_modules():
        if getattr(layer, "track_running_stats", False):
            raise UserError(
                f"layer {name} keeps statistics of the batches it sees, and each process sees its own.",
                remedy="Leave out training.parallel.virtual_workers.",
            )
