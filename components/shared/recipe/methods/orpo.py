"""Odds-ratio preference optimisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from baton.components.shared.recipe.base import Section
from baton.components.shared.recipe.methods import cpo


class ORPO(Section):
    """Odds-ratio preference optimisation, without a reference (arXiv:2403.07691)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds ratio beside the likelihood of the chosen answer (λ in the paper)."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


SPEC = replace(cpo.SPEC, name="orpo", settings=ORPO, forkable=("beta",))
