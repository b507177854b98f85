"""Group-relative policy optimisation, by TRL's `GRPOTrainer`."""

from typing import Any

from trl import GRPOConfig, GRPOTrainer

from baton.models import rewards
from baton.train import generation
from baton.train.build import Setup
from baton.train.protocol import ChunkTrainer
from baton.train.references import OwnReference

# Figures that are means over tokens.
OF_TOKENS = ("entropy", "kl", *(f"clip_ratio/{part}_mean" for part in ("low", "high", "region")))


class ExactGRPO(ChunkTrainer):
    def figure_weights(self, inputs: Any) -> dict[str, float]:
        tokens = float(inputs["completion_mask"].sum())
        found = {**super().figure_weights(inputs), **dict.fromkeys(OF_TOKENS, tokens)}
        if self.loss_type == "bnpo":
            found["loss"] = tokens
        elif self.loss_type in ("cispo", "dapo", "vespo"):  # divided by those of all processes
            found["loss"] = float(inputs["num_items_in_batch"].clamp(min=1)) / self.accelerator.num_processes
        return found


def build(setup: Setup) -> ChunkTrainer:
    grpo = setup.recipe.training.grpo
    assert grpo
    config = GRPOConfig(
        **generation.generation_arguments(setup.recipe, setup.arguments, grpo),
        beta=grpo.beta,
        loss_type=grpo.loss,
        scale_rewards=grpo.scale_rewards,
        importance_sampling_level=grpo.importance_sampling,
        top_entropy_quantile=grpo.top_entropy,
    )
    functions = rewards.build(grpo.rewards)
    trainer = setup.trainer(GRPOTrainer, config, ExactGRPO, OwnReference, reward_funcs=functions)
    rewards.bind(functions, trainer)
    return trainer
