"""Virtual workers: a step cut for a fixed number of them, whichever processes make their passes.

The run is that of one process that makes all workers' passes in order. Each process makes its own workers' passes.
Token counts, gradients and logged values are exchanged in that order. Evaluation weighs each row or token alike,
however the batches are dealt. See docs/parallel.md.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import find_batch_size, nested_detach

from baton.errors import UserError
from baton.models import rng
from baton.train.data import samplers
from baton.train.data.samplers import DistributedBatches
from baton.train.protocol import ChunkTrainer, Window
from baton.train.tree_sum import TreeSum, exchange

if TYPE_CHECKING:
    from torch import nn


# --- The passes of a step: whose they are, how much each counts, and what each has come to.


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The passes of a step as one process that makes them all would count them.

    Attributes:
        own: Numbers of this process's workers.
        rounds: Passes of each worker.
        total: Passes of all workers that have rows.
        fillers: Workers for which no row is left.
        shares: What the mean of each of a worker's passes counts, so that all rows count as much; empty where the loss
            is a sum.
    """

    own: range
    rounds: int
    total: int
    fillers: frozenset[int] = frozenset()
    shares: Mapping[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, own: range, rounds: int, workers: int) -> MicroBatches:
        """Returns those of a step that has rows for all workers."""
        return cls(own=own, rounds=rounds, total=rounds * workers)

    @classmethod
    def of_rows(cls, own: range, rounds: int, pieces: DistributedBatches, step: int, *, sums: bool) -> MicroBatches:
        """Returns those of a step of the pass over the rows, counted from 0; `sums` tells whether the loss is a sum."""
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


@dataclass(kw_only=True)
class MicroBatchResult:
    """What a pass has come to, besides its gradients.

    Attributes:
        outputs: What it returned.
        flos: Its floating-point operations.
        tokens: Tokens that it counted.
        window: Values that are averaged at the next log.
        weights: What they count in an evaluation, by name; see `ChunkTrainer.figure_weights`.
    """

    outputs: Any
    flos: float = 0.0
    tokens: int = 0
    window: Window = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


def record_micro_batch(trainer: ChunkTrainer, mode: str, compute: Callable[[], Any]) -> MicroBatchResult:
    """Returns what a pass comes to, as if nothing had been logged or counted before it.

    Args:
        trainer: The trainer, whose log and counts stay as they were.
        mode: `train` or `eval`.
        compute: Makes the pass.
    """
    windows, before, counted = trainer.windows, trainer.windows[mode], getattr(trainer, COUNTER, 0)
    windows[mode] = defaultdict(list)
    setattr(trainer, COUNTER, 0)
    try:
        outputs = compute()
        window = {name: list(values) for name, values in windows[mode].items()}
        return MicroBatchResult(outputs=outputs, tokens=getattr(trainer, COUNTER), window=window)
    finally:
        windows[mode] = before
        setattr(trainer, COUNTER, counted)


def add_micro_batch(trainer: ChunkTrainer, mode: str, made: MicroBatchResult) -> None:
    """Adds what a pass has come to to a trainer's log and counts."""
    window = trainer.windows[mode]
    setattr(trainer, COUNTER, getattr(trainer, COUNTER, 0) + made.tokens)
    for name, values in made.window.items():
        if name == "num_tokens":  # a total, not a value of each pass; trainers that write count elsewhere
            window[name] = [getattr(trainer, COUNTER) or values[-1]]
        else:
            window[name].extend(values)


COUNTER = "_total_train_tokens"
"""Attribute of TRL's trainers with the tokens trained on so far."""


# --- The batches of some of a run's virtual workers, in the order in which one process takes them.


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


# --- Evaluation: each row or token counts as much, however the rows are cut into batches and dealt to processes.
#
# With virtual workers each batch is evaluated by one of the processes, and all have every result.


class DistributedEvaluation(ChunkTrainer):
    """Mixin for a `Trainer`: sums up what batches come to, and deals them to processes that are told each is alone."""

    _evaluated: list[MicroBatchResult]
    _foreseen: list[MicroBatchResult] | None = None
    _dealt: samplers.DistributedBatches | None = None

    @property
    def _alone(self) -> bool:
        """Whether each of several processes computes its figures of its own rows, not of what it gathers."""
        return self.weighs and self.args.world_size > 1 and not self.recipe.training.spec.generates

    def get_eval_dataloader(self, *arguments: Any, **options: Any) -> torch.utils.data.DataLoader[Any]:
        """Returns the batches of this rank; Accelerate would fill up the last one with rows of the first."""
        loader = super().get_eval_dataloader(*arguments, **options)
        if self._alone:
            micro, size = self.args.per_device_eval_batch_size, self.args.world_size
            self._dealt = samplers.distribute_rows(loader, batch_size=micro * size, micro=micro, world_size=size)
        return loader

    def fills_up(self, number: int) -> bool:
        """Tells whether a batch of this rank's has a row only to fill up, where no row is left for it."""
        return bool(self._alone and self._dealt and self._dealt.is_filler(number, self.args.process_index))

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *rest: Any, **options: Any
    ) -> Any:
        """Evaluates the held-out rows."""
        self._evaluated = []
        if self.weighs:
            self.counted_whole = self._whole(dataloader.dataset) if self.has_likelihood else (0.0, 0.0)
        if self.recipe.parallel.virtual_workers and self.ranks.size > 1 and self.is_in_train:
            self._foreseen = self._evaluate_together(dataloader, bool(prediction_loss_only))
        try:
            with samplers.uneven(self.accelerator) if self._alone else contextlib.nullcontext():
                output = super().evaluation_loop(dataloader, description, prediction_loss_only, *rest, **options)
        finally:
            self._foreseen = None
        if self.weighs:
            self._sum_up(output.metrics, options.get("metric_key_prefix", "eval"))
        return output

    def prediction_step(self, model: Any, inputs: Any, *arguments: object, **options: object) -> Any:
        """Evaluates a batch, unless some process has already."""
        compute = functools.partial(super().prediction_step, model, inputs, *arguments, **options)
        virtual = self.recipe.parallel.virtual_workers
        if not (virtual or self.weighs):
            return compute()
        number = len(self._evaluated)
        if virtual:
            made = self._foreseen[number] if self._foreseen else self._evaluated_batch(number, inputs, compute)
        else:
            made = self._recorded(inputs, compute)
        add_micro_batch(self, "eval", made)
        if virtual:
            # For metrics and callbacks: where the generators are now, depends on who made it.
            self.seed(f"evaluated:{number}")
        loss = made.outputs[0]  # logits would fill the memory
        kept = None if loss is None else float(loss.float().mean())
        self._evaluated.append(MicroBatchResult(outputs=kept, window=made.window, weights=made.weights))
        return made.outputs

    def seed(self, place: str) -> None:
        """Seeds all generators by the run's seed, the step and a place in it: the same in whichever process."""
        drawn = hashlib.sha256(f"{self.args.seed}:{self.state.global_step}:{place}".encode()).digest()
        rng.seed(int.from_bytes(drawn[:4], "big"))

    def _evaluate_together(self, dataloader: Any, prediction_loss_only: bool) -> list[MicroBatchResult]:
        """Returns what all batches come to, in their order."""
        self.model.eval()
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        size, number = self.ranks.size, -1
        ours = []
        for number, inputs in enumerate(dataloader):
            if number % size == self.ranks.rank:
                compute = functools.partial(super().prediction_step, self.model, inputs, prediction_loss_only)
                ours.append(self._evaluated_batch(number, inputs, compute))
        rows = self.ranks.gather(ours)
        return [rows[at % size][at // size] for at in range(number + 1)]

    def _evaluated_batch(self, number: int, inputs: Any, compute: Callable[[], Any]) -> MicroBatchResult:
        self.seed(f"evaluation:{number}")
        made = self._recorded(inputs, compute)
        made.outputs = nested_detach(made.outputs)
        return made

    def _recorded(self, inputs: Any, compute: Callable[[], Any]) -> MicroBatchResult:
        """Returns what a batch comes to, and how much it counts."""
        self.weighed = ChunkTrainer.figure_weights(self, inputs)  # where the loss is computed, it is told better
        with _ungathered(self.accelerator) if self._alone else contextlib.nullcontext():
            made = record_micro_batch(self, "eval", compute)
        is_filler = self.fills_up(len(self._evaluated))
        made.weights = dict.fromkeys(self.weighed, 0.0) if is_filler else self.weighed
        if is_filler and made.outputs[1] is not None:
            made.outputs = (made.outputs[0], *(nothing_of(values) for values in made.outputs[1:]))
        return made

    def _whole(self, rows: Any) -> tuple[float, float]:
        """Returns rows and tokens of an evaluation."""
        found = [(0.0, 0.0)]
        for number in range(len(rows)):
            batch = self.data_collator([rows[number]])
            found.append((float(find_batch_size(batch)), float(self.likelihood_tokens(batch))))
        return sum(each for each, _ in found), sum(tokens for _, tokens in found)

    def _sum_up(self, metrics: dict[str, float], prefix: str) -> None:
        """Puts means over all rows or tokens in the place of means over batches."""
        alone, window = self.args.world_size == 1, self.windows["eval"]
        made = self._evaluated if alone else [record for ours in self.ranks.gather(self._evaluated) for record in ours]
        losses = [(record.outputs, figure_weight(record, "loss")) for record in made if record.outputs is not None]
        if losses:
            metrics[f"{prefix}_loss"] = weighted_mean(losses)
        for name in {name: None for record in made for name in record.window if name != "num_tokens"}:
            values = [
                (value, figure_weight(record, name.removeprefix("eval_")))
                for record in made
                for value in record.window.get(name, ())
                # Of a reward that no completion has there is nothing, which TRL writes so.
                if not (self.recipe.training.spec.generates and math.isnan(value))
            ]
            words = name.rpartition("/")[2].split("_")
            choose = min if "min" in words else max if "max" in words else None
            counted = [value for value, share in values if share]
            window[name] = [choose(counted, default=math.nan) if choose else weighted_mean(values)]
        for start in [name.removesuffix("chosen") for name in window if name.endswith("rewards/chosen")]:
            # A batch of KTO may have answers of one label alone, and then no margin.
            if rejected := window.get(f"{start}rejected"):
                window[f"{start}margins"] = [window[f"{start}chosen"][0] - rejected[0]]


def figure_weight(record: MicroBatchResult, name: str) -> float:
    """Returns how much a batch counts in a figure."""
    return record.weights.get(name, record.weights[""])


def weighted_mean(values: Iterable[tuple[float, float]]) -> float:
    """Returns the mean of values with weights; NaN where nothing counts."""
    counted = [(value, share) for value, share in values if share]
    total = math.fsum(share for _, share in counted)
    return math.fsum(value * share for value, share in counted) / total if total else math.nan


def nothing_of(values: Any) -> Any:
    """Returns none of the rows of tensors."""
    if isinstance(values, torch.Tensor):
        return values[:0]
    return None if values is None else type(values)(nothing_of(value) for value in values)


@contextlib.contextmanager
def _ungathered(accelerator: Any) -> Iterator[None]:
    """Has an accelerator gather nothing."""
    before = {name: vars(accelerator)[name] for name in ("gather", "gather_for_metrics") if name in vars(accelerator)}
    accelerator.gather = accelerator.gather_for_metrics = lambda values, **_: values
    try:
        yield
    finally:
        for name in ("gather", "gather_for_metrics"):
            delattr(accelerator, name)
        vars(accelerator).update(before)


# --- Virtual workers: a step is cut for so many of them, and the processes that share them leave no trace in the bits.
#
# The run is that of one process that makes all workers' passes, one after the other. Each process is told that it is
# that one, and makes the passes of its own workers; what depends on others' (the count of tokens, gradients, logged
# values) is exchanged in the order of passes. See docs/parallel.md.


Batch = dict[str, Any]
"""The tensors of a micro-batch."""


class Virtual(DistributedEvaluation):
    """Mixin for a `Trainer`: makes the passes of this process's share of a run's virtual workers, if it has such."""

    _own: range | None = None
    _pieces: samplers.DistributedBatches | None = None
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
            self._pieces = batches = samplers.DistributedBatches(
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
        self._records: list[MicroBatchResult] = []
        rounds = len(batch_samples) // len(self._own)
        if self._pieces is None:
            self._passes = MicroBatches.of(self._own, rounds, self.recipe.workers)
            return
        step = self.state.global_step % -(-len(self.train_dataset) // self._pieces.full)
        sums = self.recipe.training.spec.counts_tokens
        self._passes = MicroBatches.of_rows(self._own, rounds, self._pieces, step, sums=sums)
        fills = [self._passes.at(position)[0] in self._passes.fillers for position in range(len(batch_samples))]
        if sums:
            samplers.blank(list(itertools.compress(batch_samples, fills)))
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
            add_micro_batch(self, "train", made)
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
