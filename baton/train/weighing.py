"""Each row or token counts as much, however rows are cut into micro-batches and dealt to processes.

Upstream takes means over micro-batches in a step, and over batches in an evaluation. Here a micro-batch counts by its
rows, or by the tokens that a figure is a mean over. With several processes each step has the rows of one process.
"""

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import find_batch_size

from baton.train import samplers
from baton.train.protocol import ChunkTrainer, Window, replaced

Batch = dict[str, Any]
COUNTER = "_total_train_tokens"  # of TRL's trainers: tokens trained on so far


@dataclass(kw_only=True)
class MicroBatchResult:
    outputs: Any
    flos: float = 0.0
    tokens: int = 0
    window: Window = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)  # by `ChunkTrainer.figure_weights`

    def weight(self, figure: str) -> float:
        return self.weights.get(figure, self.weights[""])


def record_micro_batch(trainer: ChunkTrainer, mode: str, compute: Callable[[], Any]) -> MicroBatchResult:
    """Returns a pass's result with its own log and token count; the trainer's stay as they were."""
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
    """Adds a pass's log and token count to the trainer's."""
    window = trainer.windows[mode]
    setattr(trainer, COUNTER, getattr(trainer, COUNTER, 0) + made.tokens)
    for name, values in made.window.items():
        if name == "num_tokens":  # a total, not a value of each pass; trainers that write count elsewhere
            window[name] = [getattr(trainer, COUNTER) or values[-1]]
        else:
            window[name].extend(values)


def weighted_mean(values: Iterable[tuple[float, float]]) -> float:
    """Returns the mean of values with weights; NaN where nothing counts."""
    counted = [(value, share) for value, share in values if share]
    total = math.fsum(share for _, share in counted)
    return math.fsum(value * share for value, share in counted) / total if total else math.nan


class WeighedRows(ChunkTrainer):
    """Mixin: weighs the micro-batches of a step, and the batches of an evaluation.

    Gives the watchdog its heartbeats too; it watches only where several processes train.
    """

    _shares: Iterator[float] = iter(())  # weights of the step's passes to come; none are left in an evaluation
    _fetches = False
    _evaluated: list[MicroBatchResult]

    @property
    def computes_alone(self) -> bool:
        """Whether each of several processes computes figures of its own rows, not of gathered ones."""
        return False

    def get_batch_samples(self, *arguments: object, **options: object) -> object:
        self._fetches = True
        samples = super().get_batch_samples(*arguments, **options)
        self._fetches = False
        return samples

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor | None:
        # transformers 5.23 calls it once for a step's batches, before their first pass; TRL also for those of a round.
        if self._fetches:
            self.begin_step(batch_samples)
        self.watchdog.heartbeat("forward pass")
        return super()._get_num_items_in_batch(batch_samples, device)

    def begin_step(self, batches: list[Batch]) -> None:
        spec = self.recipe.training.spec
        if not (spec.counts_tokens or spec.generates):
            rows = [find_batch_size(batch) for batch in batches] if self.weighs else []
            self._shares = iter([size * len(rows) / sum(rows) for size in rows])
            self.note_whole(batches)

    def note_whole(self, counted: list[Batch]) -> None:
        """Notes a step's rows and tokens in all processes, given this one's micro-batches whose rows count."""
        if self.weighs and self.has_likelihood:
            ours = [(float(find_batch_size(batch)), float(self.likelihood_tokens(batch))) for batch in counted]
            found = self.ranks.gather_numbers([sum(values) for values in zip((0.0, 0.0), *ours, strict=True)])
            self.counted_whole = (sum(rows for rows, _ in found), sum(tokens for _, tokens in found))

    def skip_step(self, model: torch.nn.Module, inputs: Any) -> None:
        super().skip_step(model, inputs)
        # An evaluation may come next.
        self._shares = iter(())

    def compute_loss(self, model: torch.nn.Module, inputs: Any, *arguments: object, **options: object) -> Any:
        self.watchdog.heartbeat("forward pass")
        share = next(self._shares, 1.0)
        if self.weighs and not self.model.training:
            self.weighed = self.figure_weights(inputs)
        is_even = share == 1.0 or self.args.world_size == 1
        with contextlib.nullcontext() if is_even else samplers.uneven(self.accelerator):
            loss = super().compute_loss(model, inputs, *arguments, **options)
        self.watchdog.heartbeat("backward pass")
        return loss if share == 1.0 else loss * share

    def fills_up(self, number: int) -> bool:
        """Tells whether an evaluation batch only fills up, as no row is left for this rank."""
        return False

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *rest: Any, **options: Any
    ) -> Any:
        self.begin_evaluation(dataloader, prediction_loss_only=bool(prediction_loss_only))
        with samplers.uneven(self.accelerator) if self.computes_alone else contextlib.nullcontext():
            output = super().evaluation_loop(dataloader, description, prediction_loss_only, *rest, **options)
        if self.weighs:
            self._sum_up(output.metrics, options.get("metric_key_prefix", "eval"))
        return output

    def begin_evaluation(self, dataloader: Any, *, prediction_loss_only: bool) -> None:
        self._evaluated = []
        if self.weighs:
            # Of all held-out rows, before any is evaluated.
            self.counted_whole = (0.0, 0.0)
            if self.has_likelihood:
                rows = dataloader.dataset
                batches = [self.data_collator([rows[number]]) for number in range(len(rows))]
                self.counted_whole = (
                    sum((float(find_batch_size(batch)) for batch in batches), 0.0),
                    sum((float(self.likelihood_tokens(batch)) for batch in batches), 0.0),
                )

    def prediction_step(self, model: Any, inputs: Any, *arguments: object, **options: object) -> Any:
        compute = functools.partial(self.evaluate_batch, model, inputs, *arguments, **options)
        if not self.weighs:
            return compute()
        made = self.record_evaluation(inputs, compute)
        self.take_evaluation(made)
        return made.outputs

    def evaluate_batch(self, *arguments: Any, **options: Any) -> Any:
        self.watchdog.heartbeat("evaluation")
        return super().prediction_step(*arguments, **options)

    def record_evaluation(self, inputs: Any, compute: Callable[[], Any]) -> MicroBatchResult:
        self.weighed = ChunkTrainer.figure_weights(self, inputs)  # `compute_loss` knows better ones
        alone = dict.fromkeys(
            ("gather", "gather_for_metrics") if self.computes_alone else (), lambda values, **_: values
        )
        with replaced(self.accelerator, **alone):
            made = record_micro_batch(self, "eval", compute)
        is_filler = self.fills_up(len(self._evaluated))
        made.weights = dict.fromkeys(self.weighed, 0.0) if is_filler else self.weighed
        if is_filler and made.outputs[1] is not None:
            made.outputs = (made.outputs[0], *(_no_rows(values) for values in made.outputs[1:]))
        return made

    def take_evaluation(self, made: MicroBatchResult) -> None:
        add_micro_batch(self, "eval", made)
        # Without its logits: they would fill the memory.
        loss = made.outputs[0]
        kept = None if loss is None else float(loss.float().mean())
        self._evaluated.append(MicroBatchResult(outputs=kept, window=made.window, weights=made.weights))

    def _evaluated_by_all(self) -> list[MicroBatchResult]:
        if self.args.world_size == 1:
            return self._evaluated
        return [record for ours in self.ranks.gather(self._evaluated) for record in ours]

    def evaluated_rows(self, figure: str) -> list[tuple[float, float]]:
        name = figure.removeprefix("eval_")
        rows = []
        for record in self._evaluated_by_all() if self.weighs else ():
            values = record.window.get(name) or record.window.get(f"eval_{name}") or [math.nan]
            value = record.outputs if name == "loss" else values[0]
            rows.append((math.nan if value is None else float(value), record.weight(name)))
        return rows if all(math.isfinite(value) for value, _ in rows) else []

    def _sum_up(self, metrics: dict[str, float], prefix: str) -> None:
        """Replaces means over batches by means over all rows or tokens."""
        window, made = self.windows["eval"], self._evaluated_by_all()
        losses = [(record.outputs, record.weight("loss")) for record in made if record.outputs is not None]
        if losses:
            metrics[f"{prefix}_loss"] = weighted_mean(losses)
        for name in {name: None for record in made for name in record.window if name != "num_tokens"}:
            values = [
                (value, record.weight(name.removeprefix("eval_")))
                for record in made
                for value in record.window.get(name, ())
                # TRL writes NaN for a reward that no completion has.
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


class DealtRows(WeighedRows):
    """Mixin where several processes train: deals each of them its rows of a step and of an evaluation."""

    _batches: samplers.DistributedBatches | None = None
    _held_out: samplers.DistributedBatches | None = None

    @property
    def computes_alone(self) -> bool:
        return self.weighs and not self.recipe.training.spec.generates

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        if not self.recipe.training.spec.generates:  # else TRL's own sampler distributes prompts
            micro, size = self.args.per_device_train_batch_size, self.args.world_size
            batch_size = micro * self.args.gradient_accumulation_steps * size
            self._batches = samplers.distribute_rows(loader, batch_size=batch_size, micro=micro, world_size=size)
        samplers.follow_epochs(loader)
        return loader

    def get_eval_dataloader(self, *arguments: Any, **options: Any) -> DataLoader[Any]:
        loader = super().get_eval_dataloader(*arguments, **options)
        if self.computes_alone:
            # Accelerate would fill up the last batch with rows of the first.
            micro, size = self.args.per_device_eval_batch_size, self.args.world_size
            self._held_out = samplers.distribute_rows(loader, batch_size=micro * size, micro=micro, world_size=size)
        return loader

    def fills_up(self, number: int) -> bool:
        return bool(self._held_out and self._held_out.is_filler(number, self.args.process_index))

    def begin_step(self, batches: list[Batch]) -> None:
        if self._batches is None:
            return
        step, rank = self.state.global_step % -(-len(self.train_dataset) // self._batches.full), self.args.process_index
        is_filler = self._batches.is_filler(step, rank)
        if not self.recipe.training.spec.counts_tokens:
            self._shares = iter(self._batches.shares(step, rank))
            self.note_whole([] if is_filler else batches)
        elif is_filler:
            samplers.blank(batches)


def _no_rows(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values[:0]
    return None if values is None else type(values)(_no_rows(value) for value in values)
