"""Rounds of completions with virtual workers: each worker writes, shuffles, judges and keeps its own.

A worker does with its rows what a process does in TRL, one after the other in whichever process; what TRL gathers from
the others, the tokens of a round, is exchanged once all have written. Groups are whole within a worker
(`parallel_rules`), so that rewards need not be.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

from baton.components.train_chunk.trainer import passes
from baton.components.train_chunk.trainer.base import StateDict
from baton.components.train_chunk.trainer.passes import Record
from baton.components.train_chunk.trainer.turns import InTurns, Row

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

Completions = list[dict[str, Any]]
"""The completions of a worker's round, as the micro-batches that it trains on."""


class Rounds(InTurns):
    """Mixin for trainers whose model generates: has each of this process's virtual workers, if it has such, write.

    What it keeps of TRL's is then counted and held by worker: `_step` is the passes of each so far, and
    `_buffered_inputs` has the completions of each.
    """

    _step: int
    _buffered_inputs: Any
    _rows: list[list[Row]]

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """Returns the prompts of this process's workers."""
        with self._as_one_worker():
            return super().get_train_dataloader()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        sampler = super()._get_train_sampler(dataset)
        if self.recipe.parallel.virtual_workers:
            assert isinstance(sampler, RepeatSampler)
            sampler.batch_size = self.recipe.training.round_size // sampler.mini_repeat_count  # prompts of all workers
        return sampler

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """Returns the prompts of a step."""
        samples = super().get_batch_samples(*arguments, **options)
        self._rows = samples[0]
        return samples

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Makes a pass; before the first of a step, writes the rounds that begin in it."""
        if self._own is None or self.skips_step:
            return super().training_step(model, inputs, num_items_in_batch)
        if not self._records:
            self._made, began = self._step, time.perf_counter()
            self._write(model)
            self._current_train_step_time += time.perf_counter() - began
            # TRL logs the time of a step where its count comes to all passes.
            self._step = self._passes.total - len(self._passes)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if len(self._records) == len(self._passes):
            self._step = self._made + self._passes.rounds
        return loss

    def pass_over(self, model: nn.Module, inputs: Any) -> None:
        """Writes the rounds that begin in a step that is skipped: others train on them too."""
        if self._own is None:
            self._prepare_inputs(inputs)
            self._step += 1
        elif not self._records:
            self._made = self._step
            self._write(model)
            self._step = self._made + self._passes.rounds
            order = [self._passes.at(position) for position in range(len(self._passes))]
            written = [self._written[place] for place in order if place in self._written]
            for made in (made for records in self.ranks.gather(written) for made in records):
                passes.add(self, "train", made)
            self._records = [Record(outputs=0.0) for _ in order]
        super().pass_over(model, inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns the completions that a pass trains on; in an evaluation, writes them."""
        if self._own is None or not self.model.training:
            with self._as_one_worker():
                return super()._prepare_inputs(inputs)
        position = self._passes.at(len(self._records))
        if position in self._written:  # what was logged while it was written belongs to the worker
            passes.add(self, "train", self._written[position])
        return self._inputs[position]

    def _write(self, model: nn.Module) -> None:
        """Writes the rounds that begin in a step, of all own workers before any trains: the loss counts all tokens."""
        model.train()  # as a pass begins; an evaluation may have been before it
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        size = self.recipe.steps_per_generation
        every = size * getattr(self, "num_iterations", 1)  # distillation trains on what it has written once
        self._written: dict[tuple[int, int], Record] = {}
        self._inputs = {}
        for number in range(self._passes.rounds):
            now = self._made + number
            if now % every == 0:
                self._buffered_inputs = self._round(number)
            for worker, completions in zip(self._passes.own, self._buffered_inputs, strict=True):
                self._inputs[worker, number] = completions[now % size]

    def _round(self, number: int) -> list[Completions]:
        """Returns the completions of each own worker, from the prompts of a pass of theirs."""
        before = self.state.num_input_tokens_seen
        completions: list[Completions] = []
        for index, worker in enumerate(self._passes.own):
            self.seed(f"writing:{worker}:{number}")
            rows = self._rows[index * self._passes.rounds + number]
            made = passes.record(self, "train", functools.partial(self._completions, rows))
            del made.window["num_tokens"]  # a total, of these workers
            self._written[worker, number] = made
            completions.append(made.outputs)
        items = [micro[0]["num_items_in_batch"] for micro in completions if "num_items_in_batch" in micro[0]]
        seen, total = self._of_all(self.state.num_input_tokens_seen - before, sum(int(count) for count in items))
        self.state.num_input_tokens_seen = before + seen
        self.windows["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        if items:
            self._normalize(completions, total)
        return completions

    def _completions(self, rows: list[Row]) -> Completions:
        """Returns what a worker writes for its rows."""
        self._step, self._buffered_inputs = 0, None  # so that TRL writes
        with self._as_one_worker():
            super()._prepare_inputs(rows)
        # Each by itself: a slice would be saved and sent with all that it is a slice of.
        return [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in micro.items()}
            for micro in self._buffered_inputs
        ]

    def _of_all(self, seen: int, items: int) -> tuple[int, int]:
        """Returns the sums over all processes of tokens seen, and of those that count in the loss."""
        rows = self.ranks.gather_numbers([float(seen), float(items)])
        return int(sum(row[0] for row in rows)), int(sum(row[1] for row in rows))

    def _normalize(self, completions: list[Completions], total: int) -> None:
        """Gives each micro-batch of a round the tokens of all workers, by which its sum over tokens is divided."""
        # GRPO multiplies by passes of a step over those of a worker's round, and a step has the passes of all workers.
        count = total / self.recipe.workers if self.recipe.training.generation else float(total)
        for micro in (micro for ours in completions for micro in ours):
            micro["num_items_in_batch"] = torch.full_like(micro["num_items_in_batch"], count, dtype=torch.float32)

    @contextlib.contextmanager
    def _as_one_worker(self) -> Iterator[None]:
        """Has TRL take the passes of a worker for those of a step, where it asks how a round goes with steps."""
        passes_of_process = self.args.gradient_accumulation_steps
        if self.recipe.parallel.virtual_workers:
            self.args.gradient_accumulation_steps = self.recipe.gradient_accumulation_steps
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = passes_of_process

    def method_state(self) -> StateDict:
        """Returns what the method keeps, with the completions of all workers in their order; all ranks must call it."""
        state = super().method_state()
        if self._own is None or self._buffered_inputs is None:
            return state
        return {**state, "completions": [ours for part in self.ranks.gather(self._buffered_inputs) for ours in part]}

    def load_method_state(self, saved: StateDict) -> None:
        """Restores what the method keeps, of the completions those of this process's workers."""
        super().load_method_state(saved)
        if self._own is not None and self._buffered_inputs is not None:
            self._buffered_inputs = self._buffered_inputs[self._own.start : self._own.stop]
