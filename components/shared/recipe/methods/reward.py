"""Reward modelling."""

from __future__ import annotations

from baton.components.shared.recipe.base import Section
from baton.components.shared.recipe.methods.references import Coefficient
from baton.components.shared.recipe.methods.spec import PREFERENCES, MethodSpec


class Reward(Section):
    """Reward modelling: a score per answer, trained on pairs (Bradley–Terry)."""

    center_coefficient: Coefficient | None = None
    """Weight of the term that keeps rewards around zero (arXiv:2312.09244); 0.01 is usual."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


SPEC = MethodSpec(
    name="reward",
    settings=Reward,
    formats=PREFERENCES,
    rows="scored",
    sequences_per_row=2,
    scores=True,
    offloads_activations=True,
    figures=("loss", "accuracy", "margin"),
    logged={"margin": "score margin", "accuracy": "accuracy"},
)
