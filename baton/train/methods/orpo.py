"""Odds-ratio preference optimisation, by TRL's experimental `ORPOTrainer`."""

from typing import Any

from transformers import Trainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from baton.train.build import Setup
from baton.train.methods import TokenizedPairs


class ExactORPO(TokenizedPairs):
    has_likelihood = True

    def likelihood_tokens(self, inputs: Any) -> int:
        """Returns the tokens of prompts and chosen answers, without the first of each row."""
        return int(inputs["chosen_attention_mask"][:, 1:].sum())


def build(setup: Setup) -> Trainer:
    settings = setup.recipe.training.orpo
    assert settings
    config = ORPOConfig(
        **setup.arguments,
        max_length=setup.recipe.data.max_length,
        beta=settings.beta,
        disable_dropout=settings.disable_dropout,
    )
    return setup.trainer(ORPOTrainer, config, ExactORPO)
