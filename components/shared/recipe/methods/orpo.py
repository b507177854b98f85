"""Odds-ratio preference optimisation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.components.shared.recipe.base import Section
from baton.components.shared.recipe.methods.spec import AGAINST_BASELINE, PREFERENCES, MethodSpec


class ORPO(Section):
    """Odds-ratio preference optimisation, without a reference (arXiv:2403.07691)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds ratio beside the likelihood of the chosen answer (λ in the paper)."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


SPEC = MethodSpec(
    name="orpo",
    settings=ORPO,
    formats=PREFERENCES,
    rows="pairs",
    sequences_per_row=2,
    needs_all_rows=True,
    tiles_logits=False,
    figures=("loss", "perplexity", *AGAINST_BASELINE),
    logged={"rewards/margins": "reward margin", "rewards/accuracies": "preference accuracy"},
    forkable=("beta",),
)
