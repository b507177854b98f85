"""From recipe, rows and base model to a method's trainer."""

from __future__ import annotations

from typing import cast

from components.shared import models
from components.shared.plan import Plan
from components.shared.recipe import Recipe
from components.shared.trainable import freeze
from components.train_chunk import methods
from components.train_chunk.data.tokens import Tokens
from components.train_chunk.trainer import arguments
from components.train_chunk.trainer.base import ChunkTrainer
from components.train_chunk.trainer.chunked import Setup


def setup(
    recipe: Recipe,
    plan: Plan,
    tokens: Tokens,
    base: str | None,
    output_dir: str,
    *,
    start_weights: bool = True,
    evaluates: bool | None = None,
) -> Setup:
    """Returns what the method's trainer is built from.

    Args:
        recipe: The resolved recipe, its micro-batch size a number.
        plan: The run's plan.
        tokens: The tokenized rows and the tokenizer.
        base: Folder of the base model, None for a model from scratch.
        output_dir: A local folder.
        start_weights: Whether the model needs its own; left undefined where a checkpoint is loaded over them.
        evaluates: Whether held-out rows are needed; as the recipe says when None.
    """
    tokenizer = models.load_tokenizer(f"{tokens.folder}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
    model = models.start_model(recipe, tokenizer, base, weights=start_weights)
    if recipe.training.trainable:
        freeze(model, recipe.training.trainable)
    evaluates = bool(recipe.evaluation.every) if evaluates is None else evaluates
    return Setup(
        recipe=recipe,
        arguments=arguments.training_arguments(recipe, plan, output_dir),
        model=model,
        tokenizer=tokenizer,
        train=tokens.train(),
        held_out=tokens.held_out() if evaluates else None,
        reference=lambda: models.start_model(recipe, tokenizer, base),
    )


def build(parts: Setup) -> ChunkTrainer:
    """Builds the trainer of the recipe's method."""
    return cast(ChunkTrainer, methods.load(parts.recipe.training.method).build(parts))
