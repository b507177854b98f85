"""On-policy distillation, by TRL's `DistillationTrainer`."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import Trainer
from trl import DistillationConfig, DistillationTrainer

from baton.train import generation
from baton.train.build import Setup
from baton.train.protocol import ChunkTrainer, all_counted


class AllCounted(ChunkTrainer):
    """What `DistillationTrainer` does besides, also where a script has built it: no figure of a step is cut off."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Computes the loss; in training each process's figures count, also in the last step of a pass."""
        with all_counted(self.accelerator) if self.model.training else contextlib.nullcontext():
            return super().compute_loss(*arguments, **options)


class ExactDistillation(AllCounted):
    """What `DistillationTrainer` does besides."""

    def figure_weights(self, inputs: Any) -> dict[str, float]:
        tokens = float(inputs["completion_mask"].sum())
        return {**super().figure_weights(inputs), "loss": tokens, "entropy": tokens}


def build(setup: Setup) -> Trainer:
    """Builds the trainer on rows that have a `prompt`."""
    settings = setup.recipe.training.distillation
    assert settings
    config = DistillationConfig(**setup.arguments, **generation.sampling_arguments(settings), beta=settings.beta)
    return setup.trainer(DistillationTrainer, config, ExactDistillation, teacher_model=setup.second_model())
