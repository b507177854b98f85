"""Supervised fine-tuning, by TRL's `SFTTrainer`; also from scratch."""

from typing import Any

from trl import SFTConfig, SFTTrainer

from baton.models import hooks
from baton.models.train_rows import IGNORED
from baton.train.build import Setup
from baton.train.protocol import ChunkTrainer


class ExactSFT(ChunkTrainer):
    def figure_weights(self, inputs: Any) -> dict[str, float]:
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][..., 1:]
        return {"": float((labels != IGNORED).sum())}


def build(setup: Setup) -> ChunkTrainer:
    recipe = setup.recipe
    config = SFTConfig(
        **setup.arguments,
        max_length=recipe.data.max_length,
        dataset_kwargs={"skip_prepare_dataset": True},
        packing=recipe.data.packing == "best-fit",
        eval_packing=False,
        activation_offloading=recipe.training.activation_offloading,
        router_aux_loss_coef=0.0 if recipe.training.router else None,
    )
    loss = hooks.loss(recipe.hooks)
    extra: dict[str, object] = {"compute_loss_func": loss} if loss else {}
    return setup.trainer(SFTTrainer, config, ExactSFT, **extra)
