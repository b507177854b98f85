"""From recipe, rows and base model to a method's trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from baton.components.shared.models import loading, pinned
from baton.components.shared.models.trainable import freeze
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.plan import Plan
from baton.components.train_chunk import methods
from baton.components.train_chunk.data.tokens import Tokens
from baton.components.train_chunk.trainer import arguments
from baton.components.train_chunk.trainer.base import ChunkTrainer
from baton.components.train_chunk.trainer.chunked import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def setup(
    recipe: Recipe,
    plan: Plan,
    tokens: Tokens,
    folders: Mapping[str, str],
    output_dir: str,
    *,
    start_weights: bool = True,
    evaluates: bool | None = None,
    weighs: bool = True,
) -> Setup:
    """Returns what the method's trainer is built from.

    Args:
        recipe: The resolved recipe, its micro-batch size a number.
        plan: The run's plan.
        tokens: The tokenized rows and the tokenizer.
        folders: Local folders of the models that the recipe names, by role; see `pinned`.
        output_dir: A local folder.
        start_weights: Whether the model needs its own; left undefined where a checkpoint is loaded over them.
        evaluates: Whether held-out rows are needed; as the recipe says when None.
        weighs: Whether rows and tokens count alike, not batches; see `ChunkTrainer`.
    """
    tokenizer = loading.load_tokenizer(f"{tokens.folder}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
    base = folders.get(pinned.BASE)
    model = loading.start_model(recipe, tokenizer, base, weights=start_weights)
    if recipe.training.trainable:
        freeze(model, recipe.training.trainable)
    evaluates = recipe.evaluation.in_training if evaluates is None else evaluates
    return Setup(
        recipe=recipe,
        arguments=arguments.training_arguments(recipe, plan, output_dir),
        model=model,
        tokenizer=tokenizer,
        train=tokens.train(),
        held_out=tokens.held_out() if evaluates else None,
        reference=lambda: loading.start_model(recipe, tokenizer, base),
        second_model=lambda: _second_model(recipe, folders),
        weighs=weighs,
    )


def build(parts: Setup) -> ChunkTrainer:
    """Builds the trainer of the recipe's method."""
    return cast(ChunkTrainer, methods.load(parts.recipe.training.method).build(parts))


def _second_model(recipe: Recipe, folders: Mapping[str, str]) -> PreTrainedModel:
    """Loads the second model that the method's settings name."""
    assert recipe.training.second_model
    role, _ = recipe.training.second_model
    return loading.second_model(recipe, folders[role])
