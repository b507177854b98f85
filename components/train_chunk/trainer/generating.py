"""What the methods have in common whose model generates: completions that outlive a chunk's end."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from transformers import StoppingCriteria, StoppingCriteriaList, Trainer, TrainingArguments
from trl.trainer.utils import RepeatSampler

from baton.components.shared.models import rewards
from baton.components.shared.recipe import Completions, Generation
from baton.components.train_chunk.distributed.watchdog import NullWatchdog
from baton.components.train_chunk.trainer.base import Options, StateDict
from baton.components.train_chunk.trainer.chunked import Setup
from baton.components.train_chunk.trainer.references import MovingReference, OwnReference, moving
from baton.components.train_chunk.trainer.rounds import Rounds

if TYPE_CHECKING:
    from datasets import Dataset


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


class Completing(Rounds):
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


class Generating(OwnReference, MovingReference, Completing):
    """Mixin for `GRPOTrainer` and `RLOOTrainer`, whose rewards are compared in groups over all processes."""


class _Alive(StoppingCriteria):
    """Stops nothing; it is asked at each token."""

    def __init__(self, watchdog: NullWatchdog) -> None:
        self._watchdog = watchdog

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Gives a sign of life."""
        self._watchdog.alive()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def sampling(completions: Completions) -> Options:
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


def settings(setup: Setup, generation: Generation) -> Options:
    """Returns the arguments that the configurations of both trainers share."""
    num_generations = generation.num_generations
    per_device_eval = setup.arguments["per_device_eval_batch_size"]
    return {
        **setup.arguments,
        **sampling(generation),
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


def build(setup: Setup, kind: type[Trainer], config: TrainingArguments, generation: Generation) -> Trainer:
    """Builds a trainer on rows that have a `prompt` and the columns that reward functions look at."""
    functions = rewards.build(generation.rewards)
    trainer = setup.trainer(kind, config, reward_funcs=functions)
    rewards.bind(functions, trainer)
    return trainer
