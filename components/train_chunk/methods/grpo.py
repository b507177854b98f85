"""Group-relative policy optimisation, by TRL's `GRPOTrainer`."""

from __future__ import annotations

from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from baton.components.train_chunk.trainer import generating
from baton.components.train_chunk.trainer.chunked import Setup


class ChunkedGRPOTrainer(generating.Generating, GRPOTrainer):
    """`GRPOTrainer` in chunks."""


def build(setup: Setup) -> Trainer:
    """Builds the trainer on rows that have a `prompt` and the columns that reward functions look at."""
    grpo = setup.recipe.training.grpo
    assert grpo
    config = GRPOConfig(
        **generating.settings(setup, grpo),
        beta=grpo.beta,
        loss_type=grpo.loss,
        scale_rewards=grpo.scale_rewards,
        importance_sampling_level=grpo.importance_sampling,
        top_entropy_quantile=grpo.top_entropy,
    )
    return generating.build(setup, ChunkedGRPOTrainer, config, grpo)
