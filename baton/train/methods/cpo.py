"""Contrastive preference optimisation and SimPO, by TRL's experimental `CPOTrainer`."""

from typing import Any

from transformers import Trainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

from baton.models.train_rows import IGNORED
from baton.train.build import Setup
from baton.train.methods import TokenizedPairs


class ExactCPO(TokenizedPairs):
    @property
    def has_likelihood(self) -> bool:
        return bool(self.cpo_alpha)

    def likelihood_tokens(self, inputs: Any) -> int:
        return int((inputs["chosen_labels"][:, 1:] != IGNORED).sum())


def build(setup: Setup) -> Trainer:
    settings = setup.recipe.training.cpo
    assert settings
    config = CPOConfig(
        **setup.arguments,
        max_length=setup.recipe.data.max_length,
        beta=settings.beta,
        loss_type=settings.loss,
        cpo_alpha=settings.likelihood,
        simpo_gamma=settings.simpo_margin,
        label_smoothing=settings.label_smoothing,
        disable_dropout=settings.disable_dropout,
    )
    return setup.trainer(CPOTrainer, config, ExactCPO)
