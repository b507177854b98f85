"""What the methods that let the model write have in common: completions that outlive a chunk's end."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from trl.trainer.utils import RepeatSampler

from components.shared import rewards
from components.shared.recipe import Completions, Generation
from components.train_chunk import state
from components.train_chunk.chunked import Chunked, Setup
from components.train_chunk.pulse import Pulse
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


class Completing(Chunked):
    """Mixin for trainers that write: the buffered completions and the place in their cycle are state.

    Of several processes each writes and keeps its own share of a round. TRL's sampler deals them out, a round has as
    many as with one process, and TRL brings the figures of all together.
    """

    of_each = (*state.OF_EACH, "method")
    deals = False

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = SeekingRepeatSampler
        return sampler

    def load_method_state(self, saved: dict[str, Any]) -> None:
        """Puts back the completions that are still to be trained on, and how many micro-batches were."""
        trainer: Any = self
        super().load_method_state(saved)
        if self.handover and self.handover.is_reshaped:  # another number of processes: the round is written anew
            trainer._step = trainer.state.global_step * trainer.args.gradient_accumulation_steps
            trainer._buffered_inputs = None

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        """Writes, each token a sign of life: some processes are done with it long before the others."""
        trainer: Any = self
        if not (pulse := self.handover and self.handover.pulse):
            return super()._generate_single_turn(*given, **named)  # type: ignore[misc]
        adapted = getattr(trainer.model, "get_base_model", None)
        writer = adapted() if adapted else trainer.model
        pulse.beat("writing")
        writer.generate = functools.partial(writer.generate, stopping_criteria=StoppingCriteriaList([_Alive(pulse)]))
        try:
            return super()._generate_single_turn(*given, **named)  # type: ignore[misc]
        finally:
            del writer.generate
            pulse.beat("rewards")


class Generating(MovingReference, Completing):
    """Mixin for `GRPOTrainer` and `RLOOTrainer`, whose rewards are compared in groups over all processes."""


class _Alive(StoppingCriteria):
    """Stops nothing; it is asked at each token."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        """Gives a sign of life."""
        self._pulse.alive()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def sampling(completions: Completions) -> dict[str, Any]:
    """Returns the arguments of a configuration that say how the model writes."""
    return {
        "max_completion_length": completions.max_completion_length,
        "temperature": completions.temperature,
        "top_p": completions.top_p,
        "top_k": completions.top_k,
        "min_p": completions.min_p,
        "repetition_penalty": completions.repetition_penalty,
        "disable_dropout": completions.disable_dropout,
    }


def settings(setup: Setup, generation: Generation) -> dict[str, Any]:
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
        "steps_per_generation": setup.recipe.training.round_size // (setup.recipe.micro * setup.recipe.world_size),
        "epsilon": generation.epsilon,
        "epsilon_high": generation.epsilon_high,
        "mask_truncated_completions": generation.mask_truncated,
        "reward_weights": [function.weight for function in generation.rewards],
        "router_aux_loss_coef": 0.0 if setup.recipe.training.router else None,
    }


def build(setup: Setup, kind: Any, config: Any, generation: Generation) -> Any:
    """Builds a trainer on rows that have a `prompt` and the columns that reward functions look at."""
    functions = rewards.build(generation.rewards)
    trainer = setup.trainer(kind, config, reward_funcs=functions)
    rewards.bind(functions, trainer)
    return trainer
