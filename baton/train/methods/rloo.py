"""REINFORCE with a leave-one-out baseline, by TRL's `RLOOTrainer`."""

from typing import Any

from trl import RLOOConfig, RLOOTrainer

from baton.models import rewards
from baton.train import generation
from baton.train.build import Setup
from baton.train.protocol import ChunkTrainer
from baton.train.references import OwnReference


class ExactRLOO(ChunkTrainer):
    def figure_weights(self, inputs: Any) -> dict[str, float]:
        return {**super().figure_weights(inputs), "entropy": float(inputs["completion_mask"].sum())}


def build(setup: Setup) -> ChunkTrainer:
    rloo = setup.recipe.training.rloo
    assert rloo
    config = RLOOConfig(
        **generation.generation_arguments(setup.recipe, setup.arguments, rloo),
        beta=rloo.beta,
        normalize_advantages=rloo.normalize_advantages,
    )
    functions = rewards.build(rloo.rewards)
    trainer = setup.trainer(RLOOTrainer, config, ExactRLOO, OwnReference, reward_funcs=functions)
    rewards.bind(functions, trainer)
    return trainer
