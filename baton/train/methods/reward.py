"""Reward modelling on pairs, by TRL's `RewardTrainer`."""

from transformers import Trainer
from trl import RewardConfig, RewardTrainer

from baton.train.build import Setup


def build(setup: Setup) -> Trainer:
    recipe, settings = setup.recipe, setup.recipe.training.reward
    assert settings
    config = RewardConfig(
        **setup.arguments,
        max_length=recipe.data.max_length,
        center_rewards_coefficient=settings.center_coefficient,
        disable_dropout=settings.disable_dropout,
        activation_offloading=recipe.training.activation_offloading,
    )
    return setup.trainer(RewardTrainer, config)
