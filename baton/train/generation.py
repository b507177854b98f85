"""Trainers whose model generates: conversational prompts, rounds of virtual workers, resumable buffers.

A worker handles its rows as a process does in TRL, one worker after the other. The tokens of a round are exchanged
once all have written. Groups are whole within a worker, so rewards need no exchange. Completions outlive a chunk's
end.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from transformers import StoppingCriteria, StoppingCriteriaList, Trainer, TrainingArguments
from trl.trainer.utils import RepeatSampler

from baton.models import chat, rewards
from baton.models.chat_template import ChatTemplate
from baton.recipe.methods import Completions, Generation
from baton.train import virtual
from baton.train.distributed.watchdog import NullWatchdog
from baton.train.protocol import Options, StateDict
from baton.train.references import MovingReference, OwnReference, moving
from baton.train.trainer import ExactResume, Setup
from baton.train.virtual import MicroBatchResult

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn


# --- What the methods whose model generates do with prompts that are conversations.


Row = dict[str, Any]


class ConversationalPrompts(ExactResume):
    """Mixin for trainers whose model generates: a prompt is rendered with the tools that its row declares, an
    answer ends with its turn, and is judged in the row's own shape.

    TRL's trainers take tools as Python functions, the same for all rows, and run them; a row's are declarations alone.
    """

    eos_token_ids: list[int]
    generation_config: Any
    generation_kwargs: Row
    chat_template_kwargs: Row
    _declared: Sequence[Any] = ()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        end = ChatTemplate(self.processing_class).end_of_turn
        if end is None or end in self.eos_token_ids or not isinstance(self.train_dataset[0]["prompt"], list):
            return
        # TRL takes those of the tokenizer and the model, and neither need name the one that the template writes.
        self.eos_token_ids = [*self.eos_token_ids, end]
        self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids

    def _calculate_rewards(
        self, inputs: list[Row], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Any:
        """Judges a row whose prompt is a text as texts, though the model saw a conversation."""
        if chat.PROMPT_TEXT in inputs[0]:
            prompts = [row[chat.PROMPT_TEXT] for row in inputs]
            completions = self.processing_class.batch_decode(completion_ids_list, skip_special_tokens=True)
            inputs = [rewards.columns(row) for row in inputs]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: list[Row]) -> Any:
        self._declared = [row.get("tools") for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if not any(self._declared):
            return super()._tokenize_prompts(prompts)
        ids = [
            self.processing_class.apply_chat_template(
                prompt,
                tools=tools,
                chat_template=getattr(self, "chat_template", None),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.chat_template_kwargs,
            )["input_ids"]
            for prompt, tools in zip(prompts, self._declared, strict=True)
        ]
        return ids, None, {}


# --- Rounds of completions with virtual workers: each worker writes, shuffles, judges and keeps its own.
#
# A worker does with its rows what a process does in TRL, one after the other in whichever process; what TRL gathers
# from the others, the tokens of a round, is exchanged once all have written. Groups are whole within a worker
# (`parallel_rules`), so that rewards need not be.


RoundCompletions = list[dict[str, Any]]
"""The completions of a worker's round, as the micro-batches that it trains on."""


class VirtualGeneration(ConversationalPrompts):
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
                virtual.add_micro_batch(self, "train", made)
            self._records = [MicroBatchResult(outputs=0.0) for _ in order]
        super().pass_over(model, inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns the completions that a pass trains on; in an evaluation, writes them."""
        if self._own is None or not self.model.training:
            with self._as_one_worker():
                return super()._prepare_inputs(inputs)
        position = self._passes.at(len(self._records))
        if position in self._written:  # what was logged while it was written belongs to the worker
            virtual.add_micro_batch(self, "train", self._written[position])
        return self._inputs[position]

    def _write(self, model: nn.Module) -> None:
        """Writes the rounds that begin in a step, of all own workers before any trains: the loss counts all tokens."""
        model.train()  # as a pass begins; an evaluation may have been before it
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        size = self.recipe.steps_per_generation
        every = size * getattr(self, "num_iterations", 1)  # distillation trains on what it has written once
        self._written: dict[tuple[int, int], MicroBatchResult] = {}
        self._inputs = {}
        for number in range(self._passes.rounds):
            now = self._made + number
            if now % every == 0:
                self._buffered_inputs = self._round(number)
            for worker, completions in zip(self._passes.own, self._buffered_inputs, strict=True):
                self._inputs[worker, number] = completions[now % size]

    def _round(self, number: int) -> list[RoundCompletions]:
        """Returns the completions of each own worker, from the prompts of a pass of theirs."""
        before = self.state.num_input_tokens_seen
        completions: list[RoundCompletions] = []
        for index, worker in enumerate(self._passes.own):
            self.seed(f"writing:{worker}:{number}")
            rows = self._rows[index * self._passes.rounds + number]
            made = virtual.record_micro_batch(self, "train", functools.partial(self._completions, rows))
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

    def _completions(self, rows: list[Row]) -> RoundCompletions:
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

    def _normalize(self, completions: list[RoundCompletions], total: int) -> None:
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


# --- What the methods have in common whose model generates: completions that outlive a chunk's end.


class SeekingRepeatSampler(RepeatSampler):
    """TRL's sampler, whose order in an epoch does not depend on the epochs drawn in this process.

    Upstream draws each epoch's permutation from one generator, which a resumed process begins anew.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                # Drawn and dropped: the generator is then where an uninterrupted process has it.
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


class ResumableGeneration(VirtualGeneration):
    """Mixin for trainers whose model generates: the buffered completions and the place in their cycle are state.

    Of several ranks each generates and keeps its own share of a round. TRL's sampler distributes them, a round has as
    many as with one process, and TRL gathers the figures of all.
    """

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        sampler = super()._get_train_sampler(dataset)
        # TRL's own, built with all its settings; only how it iterates is ours.
        sampler.__class__ = SeekingRepeatSampler
        return sampler

    def load_method_state(self, saved: StateDict) -> None:
        """Restores the completions that are still to be trained on, and how many micro-batches were."""
        super().load_method_state(saved)
        if self.resumption.is_reshaped:  # with another number of ranks, the round is generated anew
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            # TRL generates when there is nothing in the buffer.
            self._buffered_inputs = None

    def _generate_single_turn(self, *arguments: object, **options: object) -> Any:
        """Generates, each token a sign of life: some ranks are done with it long before the others."""
        if not self.watchdog.is_watching:
            return super()._generate_single_turn(*arguments, **options)
        adapted = getattr(self.model, "get_base_model", None)
        model = adapted() if adapted else self.model
        alive = StoppingCriteriaList([_Alive(self.watchdog)])
        self.watchdog.beat("writing")
        model.generate = functools.partial(model.generate, stopping_criteria=alive)
        try:
            return super()._generate_single_turn(*arguments, **options)
        finally:
            del model.generate
            self.watchdog.beat("rewards")


class Generating(OwnReference, MovingReference, ResumableGeneration):
    """Mixin for `GRPOTrainer` and `RLOOTrainer`, whose rewards are compared in groups over all processes."""


class _Alive(StoppingCriteria):
    """Stops nothing; it is asked at each token."""

    def __init__(self, watchdog: NullWatchdog) -> None:
        self._watchdog = watchdog

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Gives a sign of life."""
        self._watchdog.alive()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def sampling_arguments(completions: Completions) -> Options:
    """Returns the arguments of a configuration that say how the model generates."""
    return {
        "max_completion_length": completions.max_completion_length,
        "temperature": completions.temperature,
        "top_p": completions.top_p,
        "top_k": completions.top_k,
        "min_p": completions.min_p,
        "repetition_penalty": completions.repetition_penalty,
        "disable_dropout": completions.disable_dropout,
    }


def generation_arguments(setup: Setup, generation: Generation) -> Options:
    """Returns the arguments that the configurations of both trainers share."""
    num_generations = generation.num_generations
    per_device_eval = setup.arguments["per_device_eval_batch_size"]
    return {
        **setup.arguments,
        **sampling_arguments(generation),
        **moving(generation.sync_reference),
        "per_device_eval_batch_size": -(-per_device_eval // num_generations) * num_generations,
        "num_generations": num_generations,
        "num_iterations": generation.num_iterations,
        "steps_per_generation": setup.recipe.steps_per_generation,
        "epsilon": generation.epsilon,
        "epsilon_high": generation.epsilon_high,
        "mask_truncated_completions": generation.mask_truncated,
        "reward_weights": [function.weight for function in generation.rewards],
        "router_aux_loss_coef": 0.0 if setup.recipe.training.router else None,
    }


def build_generating(setup: Setup, kind: type[Trainer], config: TrainingArguments, generation: Generation) -> Trainer:
    """Builds a trainer on rows that have a `prompt` and the columns that reward functions look at."""
    functions = rewards.build(generation.rewards)
    trainer = setup.trainer(kind, config, reward_funcs=functions)
    rewards.bind(functions, trainer)
    return trainer
