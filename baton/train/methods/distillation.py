"""On-policy distillation, by TRL's `DistillationTrainer`."""

from typing import Any

from transformers import Trainer
from trl import DistillationConfig, DistillationTrainer

from baton.train import generation
from baton.train.build import Setup
from baton.train.methods import AllCounted


class ExactDistillation(AllCounted):
    def figure_weights(self, inputs: Any) -> dict[str, float]:
        tokens = float(inputs["completion_mask"].sum())
        return {**super().figure_weights(inputs), "loss": tokens, "entropy": tokens}


def build(setup: Setup) -> Trainer:
    settings = setup.recipe.training.distillation
    assert settings
    config = DistillationConfig(**setup.arguments, **generation.sampling_arguments(settings), beta=settings.beta)
    return setup.trainer(DistillationTrainer, config, ExactDistillation, teacher_model=setup.second_model())
