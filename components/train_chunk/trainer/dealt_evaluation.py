"""Evaluation: each row or token counts as much, however the rows are cut into batches and dealt to processes.

With virtual workers each batch is evaluated by one of the processes, and all have every result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers.trainer_pt_utils import find_batch_size, nested_detach

from baton.components.shared.core import rng
from baton.components.train_chunk.data import distributed_sampler
from baton.components.train_chunk.trainer import passes
from baton.components.train_chunk.trainer.base import ChunkTrainer
from baton.components.train_chunk.trainer.passes import Record


class Dealt(ChunkTrainer):
    """Mixin for a `Trainer`: sums up what batches come to, and deals them to processes that are told each is alone."""

    _evaluated: list[Record]
    _foreseen: list[Record] | None = None
    _dealt: distributed_sampler.DistributedBatches | None = None

    @property
    def _alone(self) -> bool:
        """Whether each of several processes computes its figures of its own rows, not of what it gathers."""
        return self.weighs and self.args.world_size > 1 and not self.recipe.training.spec.generates

    def get_eval_dataloader(self, *arguments: Any, **options: Any) -> torch.utils.data.DataLoader[Any]:
        """Returns the batches of this rank; Accelerate would fill up the last one with rows of the first."""
        loader = super().get_eval_dataloader(*arguments, **options)
        if self._alone:
            micro, size = self.args.per_device_eval_batch_size, self.args.world_size
            self._dealt = distributed_sampler.distribute(loader, batch_size=micro * size, micro=micro, world_size=size)
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
            with distributed_sampler.uneven(self.accelerator) if self._alone else contextlib.nullcontext():
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
        passes.add(self, "eval", made)
        if virtual:
            # For metrics and callbacks: where the generators are now, depends on who made it.
            self.seed(f"evaluated:{number}")
        loss = made.outputs[0]  # logits would fill the memory
        kept = None if loss is None else float(loss.float().mean())
        self._evaluated.append(Record(outputs=kept, window=made.window, weights=made.weights))
        return made.outputs

    def seed(self, place: str) -> None:
        """Seeds all generators by the run's seed, the step and a place in it: the same in whichever process."""
        drawn = hashlib.sha256(f"{self.args.seed}:{self.state.global_step}:{place}".encode()).digest()
        rng.seed(int.from_bytes(drawn[:4], "big"))

    def _evaluate_together(self, dataloader: Any, prediction_loss_only: bool) -> list[Record]:
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

    def _evaluated_batch(self, number: int, inputs: Any, compute: Callable[[], Any]) -> Record:
        self.seed(f"evaluation:{number}")
        made = self._recorded(inputs, compute)
        made.outputs = nested_detach(made.outputs)
        return made

    def _recorded(self, inputs: Any, compute: Callable[[], Any]) -> Record:
        """Returns what a batch comes to, and how much it counts."""
        self.weighed = ChunkTrainer.figure_weights(self, inputs)  # where the loss is computed, it is told better
        with _ungathered(self.accelerator) if self._alone else contextlib.nullcontext():
            made = passes.record(self, "eval", compute)
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
        losses = [(record.outputs, weight(record, "loss")) for record in made if record.outputs is not None]
        if losses:
            metrics[f"{prefix}_loss"] = mean(losses)
        for name in {name: None for record in made for name in record.window if name != "num_tokens"}:
            values = [
                (value, weight(record, name.removeprefix("eval_")))
                for record in made
                for value in record.window.get(name, ())
                # Of a reward that no completion has there is nothing, which TRL writes so.
                if not (self.recipe.training.spec.generates and math.isnan(value))
            ]
            words = name.rpartition("/")[2].split("_")
            choose = min if "min" in words else max if "max" in words else None
            counted = [value for value, share in values if share]
            window[name] = [choose(counted, default=math.nan) if choose else mean(values)]
        for start in [name.removesuffix("chosen") for name in window if name.endswith("rewards/chosen")]:
            # A batch of KTO may have answers of one label alone, and then no margin.
            if rejected := window.get(f"{start}rejected"):
                window[f"{start}margins"] = [window[f"{start}chosen"][0] - rejected[0]]


def weight(record: Record, name: str) -> float:
    """Returns how much a batch counts in a figure."""
    return record.weights.get(name, record.weights[""])


def mean(values: Iterable[tuple[float, float]]) -> float:
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
