"""Kahneman–Tversky optimisation, by TRL's `KTOTrainer`."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import Trainer
from trl import KTOConfig, KTOTrainer

from baton.components.train_chunk.trainer.chunked import Chunked, Setup
from baton.components.train_chunk.trainer.references import MovingReference, moving


class ChunkedKTOTrainer(MovingReference, Chunked, KTOTrainer):
    """`KTOTrainer` in chunks."""


def build(setup: Setup) -> Trainer:
    """Builds the trainer on rows that have `prompt_ids`, `completion_ids` and `label`.

    KTO takes rows in their order, and pairs each prompt with its neighbour's completion within a micro-batch to
    estimate the divergence; so the rows are shuffled once by the seed, and neighbours are joined here. Of several
    processes the micro-batches of all make one estimate, and neighbours may be dealt to different ones.
    """
    recipe, settings = setup.recipe, setup.recipe.training.kto
    assert settings
    config = KTOConfig(
        **setup.arguments,
        **moving(settings.sync_reference),
        max_length=recipe.data.max_length,
        beta=settings.beta,
        loss_type=settings.loss,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
        disable_dropout=settings.disable_dropout,
        activation_offloading=recipe.training.activation_offloading,
        router_aux_loss_coef=0.0 if recipe.training.router else None,
    )
    rows, held_out = config.per_device_train_batch_size, config.per_device_eval_batch_size
    setup = dataclasses.replace(
        setup,
        train=_with_neighbours(setup.train.shuffle(seed=recipe.seed), rows * config.world_size),
        held_out=setup.held_out and _with_neighbours(setup.held_out, held_out * config.world_size),
    )
    return setup.trainer(ChunkedKTOTrainer, config, **setup.with_reference())


def _with_neighbours(rows: Any, batch_size: int) -> Any:
    def join(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        completions = batch["completion_ids"]
        return {"KL_completion_ids": [completions[-1], *completions[:-1]]}

    return rows.map(join, batched=True, batch_size=batch_size, load_from_cache_file=False)
