"""Direct preference optimisation and its variants, by TRL's `DPOTrainer`."""

from __future__ import annotations

from transformers import Trainer
from trl import DPOConfig, DPOTrainer

from components.train_chunk.trainer.chunked import Chunked, Setup
from components.train_chunk.trainer.references import MovingReference, moving


class ChunkedDPOTrainer(MovingReference, Chunked, DPOTrainer):
    """`DPOTrainer` in chunks."""


def build(setup: Setup) -> Trainer:
    """Builds the trainer on rows that have `prompt_ids`, `chosen_ids` and `rejected_ids`."""
    recipe, settings = setup.recipe, setup.recipe.training.dpo
    assert settings
    config = DPOConfig(
        **setup.arguments,
        **moving(settings.sync_reference),
        max_length=recipe.data.max_length,
        beta=settings.beta,
        loss_type=list(settings.loss),
        loss_weights=settings.loss_weights,
        label_smoothing=settings.label_smoothing,
        f_divergence_type=settings.f_divergence,
        use_weighting=settings.weighting,
        ld_alpha=settings.length_desensitization,
        disable_dropout=settings.disable_dropout,
        activation_offloading=recipe.training.activation_offloading,
        router_aux_loss_coef=0.0 if recipe.training.router else None,
    )
    return setup.trainer(ChunkedDPOTrainer, config, **setup.with_reference())
