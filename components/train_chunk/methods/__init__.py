"""Training methods, one file each, found by the name in `training.method`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

    from components.shared.recipe import Recipe


def build_trainer(
    recipe: Recipe,
    arguments: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    held_out: Dataset | None,
) -> Trainer:
    """Returns the trainer of the recipe's method; see the README beside this file."""
    method = importlib.import_module(f"{__name__}.{recipe.training.method}")
    trainer: Trainer = method.build(recipe, arguments, model, tokenizer, train, held_out)
    return trainer
