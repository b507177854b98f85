"""Kahneman–Tversky optimisation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.components.shared.recipe.methods.references import Referenced
from baton.components.shared.recipe.methods.spec import PREFERENCES, START_COPY, MethodSpec


class KTO(Referenced):
    """Kahneman–Tversky optimisation on single answers that are good or bad (arXiv:2402.01306)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the reference holds the model."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Loss, by TRL's names."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of good answers."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of bad answers."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


SPEC = MethodSpec(
    name="kto",
    settings=KTO,
    formats=("rated", *PREFERENCES),
    rows="rated",
    micro_batch_decides_loss=True,
    own_order="takes rows in their order",
    needs_all_rows=True,
    offloads_activations=True,
    second_model=START_COPY,
    logged={"rewards/margins": "reward margin", "kl": "KL", "entropy": "entropy"},
    forkable=("beta", "desirable_weight", "undesirable_weight"),
)
