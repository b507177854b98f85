"""Contrastive preference optimisation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.components.shared.recipe.base import Section
from baton.components.shared.recipe.methods.references import Coefficient
from baton.components.shared.recipe.methods.spec import AGAINST_BASELINE, PREFERENCES, MethodSpec


class CPO(Section):
    """Contrastive preference optimisation, without a reference (arXiv:2401.08417), and SimPO (arXiv:2405.14734)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Steepness of the preference loss."""
    loss: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """Loss, by TRL's names."""
    likelihood: Coefficient = 1.0
    """Weight of the likelihood of the chosen answer; 0 for SimPO proper."""
    simpo_margin: Coefficient = 0.5
    """Target margin γ of `simpo`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be labelled the wrong way round."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


SPEC = MethodSpec(
    name="cpo",
    settings=CPO,
    formats=PREFERENCES,
    rows="pairs",
    sequences_per_row=2,
    needs_all_rows=True,
    tiles_logits=False,
    figures=("loss", "perplexity", *AGAINST_BASELINE),
    logged={"rewards/margins": "reward margin", "rewards/accuracies": "preference accuracy"},
    forkable=("beta", "label_smoothing"),
)
