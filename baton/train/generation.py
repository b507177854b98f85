"""Trainers whose model generates: conversational prompts, resumable buffers, rounds of virtual workers.

Completions outlive a chunk's end. A virtual worker handles its rows as a process does in TRL, one worker after the
other; the tokens of a round are exchanged once all have generated. Groups are whole within a worker (`parallel_rules`),
so rewards need no exchange.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import StoppingCriteria, StoppingCriteriaList
from trl.trainer.utils import RepeatSampler

from baton.models import chat, rewards
from baton.models.chat import ChatTemplate
from baton.recipe.methods import Completions, Generation
from baton.recipe.recipe import Recipe
from baton.train import weighing
from baton.train.distributed import Watchdog
from baton.train.protocol import ChunkTrainer, Options, StateDict
from baton.train.references import moving
from baton.train.virtual import MicroBatches
from baton.train.weighing import MicroBatchResult

Row = dict[str, Any]
RoundCompletions = list[dict[str, Any]]  # of a worker's round, as the micro-batches that it trains on


class ConversationalPrompts(ChunkTrainer):
    """Mixin: renders a prompt with its row's tools, ends an answer with its turn, and judges the row's own shape.

    TRL's trainers run tools as Python functions, the same for all rows; a row's tools are declarations alone.
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
        # TRL takes the tokenizer's and the model's, and neither need name the template's.
        self.eos_token_ids = [*self.eos_token_ids, end]
        self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids

    def _calculate_rewards(
        self, inputs: list[Row], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Any:
        # TRL 1.16 judges the model's view: a conversation, where the row's prompt is a text.
        if chat.PROMPT_TEXT in inputs[0]:
            prompts = [row[chat.PROMPT_TEXT] for row in inputs]
            completions = self.processing_class.batch_decode(completion_ids_list, skip_special_tokens=True)
            inputs = [rewards.columns(row) for row in inputs]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: list[Row]) -> Any:
        # TRL 1.16 passes the prompts alone on to `_tokenize_prompts`.
        self._declared = [row.get("tools") for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        # TRL 1.16 renders all prompts with the trainer's own tools.
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


class SeekingRepeatSampler(RepeatSampler):
    """TRL's sampler, whose order in an epoch does not depend on the epochs drawn in this process."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                # Drawn and dropped: the generator is then where an uninterrupted process has it.
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


class ResumableGeneration(ChunkTrainer):
    """Mixin: the buffered completions and the place in their cycle are state.

    Each of several ranks generates and keeps its own share of a round. TRL's sampler distributes the prompts, as many
    as with one process, and TRL gathers the figures of all.
    """

    _step: int  # passes so far, by which TRL knows when a round is over
    _buffered_inputs: Any

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        # TRL 1.16's own, built with all its settings; only how it iterates is ours.
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = SeekingRepeatSampler
        return sampler

    def load_method_state(self, saved: StateDict) -> None:
        super().load_method_state(saved)
        if self.resumption.is_reshaped:  # with another number of ranks, the round is generated again
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            # TRL generates when there is nothing in the buffer.
            self._buffered_inputs = None

    def skip_step(self, model: nn.Module, inputs: Any) -> None:
        # Rounds that begin in a skipped step are written: later steps train on them too.
        self.write_skipped(model, inputs)
        super().skip_step(model, inputs)

    def write_skipped(self, model: nn.Module, inputs: Any) -> None:
        self._prepare_inputs(inputs)
        self._step += 1

    def _generate_single_turn(self, *arguments: object, **options: object) -> Any:
        # TRL 1.16 has no hook at each token, the watchdog's sign of life: some ranks finish long before the others.
        if not self.watchdog.is_watching:
            return super()._generate_single_turn(*arguments, **options)
        adapted = getattr(self.model, "get_base_model", None)
        model = adapted() if adapted else self.model
        alive = StoppingCriteriaList([_Alive(self.watchdog)])
        self.watchdog.heartbeat("writing")
        model.generate = functools.partial(model.generate, stopping_criteria=alive)
        try:
            return super()._generate_single_turn(*arguments, **options)
        finally:
            del model.generate
            self.watchdog.heartbeat("rewards")


class VirtualGeneration(ResumableGeneration):
    """Mixin for `VirtualWorkers`: each of this process's workers generates, shuffles, judges and keeps its own rows.

    TRL's attributes are by worker here: `_step` counts each one's passes, `_buffered_inputs` has their completions.
    """

    _own: range | None
    _passes: MicroBatches
    _records: list[MicroBatchResult]
    _rows: list[list[Row]]

    def get_train_dataloader(self) -> DataLoader[Any]:
        with self._as_one_worker():
            return super().get_train_dataloader()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        # TRL 1.16 takes the prompts of a round for those of the processes that it sees, which is one.
        sampler = super()._get_train_sampler(dataset)
        assert isinstance(sampler, RepeatSampler)
        sampler.batch_size = self.recipe.training.round_size // sampler.mini_repeat_count  # prompts of all workers
        return sampler

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        samples = super().get_batch_samples(*arguments, **options)
        self._rows = samples[0]
        return samples

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.skips_step:
            return super().training_step(model, inputs, num_items_in_batch)
        if not self._records:
            self._made, began = self._step, time.perf_counter()
            self._write(model)
            self._current_train_step_time += time.perf_counter() - began
            # TRL logs a step's time where its count reaches all passes.
            self._step = self._passes.total - len(self._passes)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if len(self._records) == len(self._passes):
            self._step = self._made + self._passes.rounds
        return loss

    def write_skipped(self, model: nn.Module, inputs: Any) -> None:
        if self._records:  # the whole step was written in place of its first pass
            return
        self._made = self._step
        self._write(model)
        self._step = self._made + self._passes.rounds
        order = [self._passes.at(position) for position in range(len(self._passes))]
        written = [self._written[place] for place in order if place in self._written]
        for made in (made for records in self.ranks.gather(written) for made in records):
            weighing.add_micro_batch(self, "train", made)
        self._records = [MicroBatchResult(outputs=0.0) for _ in order]

    def _prepare_inputs(self, inputs: Any) -> Any:
        # TRL 1.16 writes a round here, and returns the completions that a pass trains on.
        if self._own is None or not self.model.training:
            with self._as_one_worker():
                return super()._prepare_inputs(inputs)
        position = self._passes.at(len(self._records))
        if position in self._written:  # its writing's log belongs to the worker
            weighing.add_micro_batch(self, "train", self._written[position])
        return self._inputs[position]

    def _write(self, model: nn.Module) -> None:
        """Writes the rounds that begin in a step."""
        self.enter_training(model)
        # All own workers write before any trains, as the loss counts the tokens of all.
        size = self.recipe.steps_per_generation
        every = size * getattr(self, "num_iterations", 1)  # distillation trains once on completions
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
            made = weighing.record_micro_batch(self, "train", functools.partial(self._completions, rows))
            del made.window["num_tokens"]  # a total, of these workers
            self._written[worker, number] = made
            completions.append(made.outputs)
        items = [micro[0]["num_items_in_batch"] for micro in completions if "num_items_in_batch" in micro[0]]
        seen, total = self._of_all(self.state.num_input_tokens_seen - before, sum(int(count) for count in items))
        self.state.num_input_tokens_seen = before + seen
        self.windows["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        if items:
            # The sum over a micro-batch's tokens is divided by the tokens of all workers. GRPO multiplies by a step's
            # passes over those of a worker's round, and a step has the passes of all workers.
            count = total / self.recipe.workers if self.recipe.training.generation else float(total)
            for micro in (micro for ours in completions for micro in ours):
                micro["num_items_in_batch"] = torch.full_like(micro["num_items_in_batch"], count, dtype=torch.float32)
        return completions

    def _completions(self, rows: list[Row]) -> RoundCompletions:
        self._step, self._buffered_inputs = 0, None  # so that TRL writes
        with self._as_one_worker():
            super()._prepare_inputs(rows)
        # Each by itself: a slice would be saved and sent with all that it is a slice of.
        return [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in micro.items()}
            for micro in self._buffered_inputs
        ]

    def _of_all(self, seen: int, items: int) -> tuple[int, int]:
        """Returns the sums over all processes of tokens seen, and of tokens in the loss."""
        rows = self.ranks.gather_numbers([float(seen), float(items)])
        return int(sum(row[0] for row in rows)), int(sum(row[1] for row in rows))

    @contextlib.contextmanager
    def _as_one_worker(self) -> Iterator[None]:
        """Has TRL take a worker's passes for a step's, where it relates rounds to steps."""
        passes_of_process = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = self.recipe.gradient_accumulation_steps
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = passes_of_process

    def method_state(self) -> StateDict:
        state = super().method_state()
        # Completions of all workers, in their order; it gathers, so all ranks must call it.
        if self._own is None or self._buffered_inputs is None:
            return state
        return {**state, "completions": [ours for part in self.ranks.gather(self._buffered_inputs) for ours in part]}

    def load_method_state(self, saved: StateDict) -> None:
        super().load_method_state(saved)
        if self._own is not None and self._buffered_inputs is not None:
            self._buffered_inputs = self._buffered_inputs[self._own.start : self._own.stop]


class _Alive(StoppingCriteria):
    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self._watchdog.tick()  # called at each token; stops nothing
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def sampling_arguments(completions: Completions) -> Options:
    return {
        "max_completion_length": completions.max_completion_length,
        "temperature": completions.temperature,
        "top_p": completions.top_p,
        "top_k": completions.top_k,
        "min_p": completions.min_p,
        "repetition_penalty": completions.repetition_penalty,
        "disable_dropout": completions.disable_dropout,
    }


def generation_arguments(recipe: Recipe, arguments: Options, generation: Generation) -> Options:
    """Returns the arguments of `GRPOConfig` and `RLOOConfig`, with those of every method."""
    num_generations = generation.num_generations
    per_device_eval = arguments["per_device_eval_batch_size"]
    return {
        **arguments,
        **sampling_arguments(generation),
        **moving(generation.sync_reference),
        "per_device_eval_batch_size": -(-per_device_eval // num_generations) * num_generations,
        "num_generations": num_generations,
        "num_iterations": generation.num_iterations,
        "steps_per_generation": recipe.steps_per_generation,
        "epsilon": generation.epsilon,
        "epsilon_high": generation.epsilon_high,
        "mask_truncated_completions": generation.mask_truncated,
        "reward_weights": [function.weight for function in generation.rewards],
        "router_aux_loss_coef": 0.0 if recipe.training.router else None,
    }
