"""What the methods that let the model write have in common: completions that outlive a chunk's end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

from components.shared import rewards
from components.shared.recipe import Generation
from components.train_chunk.chunked import Chunked, Setup
from components.train_chunk.references import MovingReference, moving


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
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


class Generating(MovingReference, Chunked):
    """Mixin for `GRPOTrainer` and `RLOOTrainer`: buffered completions and the place in their cycle are state."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = SeekingRepeatSampler
        return sampler

    def method_state(self) -> dict[str, Any]:
        """Returns the completions that are still to be trained on, and how many micro-batches were."""
        trainer: Any = self
        return {**super().method_state(), "step": trainer._step, "completions": trainer._buffered_inputs}

    def load_method_state(self, saved: dict[str, Any]) -> None:
        """Puts them back."""
        trainer: Any = self
        super().load_method_state(saved)
        trainer._step, trainer._buffered_inputs = saved["step"], saved["completions"]


def settings(setup: Setup, generation: Generation) -> dict[str, Any]:
    """Returns the arguments that the configurations of both trainers share."""
    num_generations = generation.num_generations
    per_device_eval = setup.arguments["per_device_eval_batch_size"]
    return {
        **setup.arguments,
        **moving(generation.sync_reference),
        "per_device_eval_batch_size": -(-per_device_eval // num_generations) * num_generations,
        "num_generations": num_generations,
        "max_completion_length": generation.max_completion_length,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "min_p": generation.min_p,
        "repetition_penalty": generation.repetition_penalty,
        "num_iterations": generation.num_iterations,
        "steps_per_generation": generation.steps_per_generation,
        "epsilon": generation.epsilon,
        "epsilon_high": generation.epsilon_high,
        "mask_truncated_completions": generation.mask_truncated,
        "disable_dropout": generation.disable_dropout,
        "reward_weights": [function.weight for function in generation.rewards],
        "router_aux_loss_coef": 0.0 if setup.recipe.training.router else None,
    }


def build(setup: Setup, kind: Any, config: Any, generation: Generation) -> Any:
    """Builds a trainer on rows that have a `prompt` and the columns that reward functions look at."""
    functions = rewards.build(generation.rewards)
    trainer = setup.trainer(kind, config, reward_funcs=functions)
    rewards.bind(functions, trainer)
    return trainer
