"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import replace

from baton.components.shared.recipe.methods import grpo
from baton.components.shared.recipe.methods.completions import Generation
from baton.components.shared.recipe.methods.references import Coefficient


class RLOO(Generation):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    beta: Coefficient = 0.05
    """Weight of the divergence from the start model, taken off the reward; 0 needs no reference."""
    normalize_advantages: bool = False
    """Bring the advantages of a batch to mean 0 and variance 1."""


SPEC = replace(grpo.SPEC, name="rloo", settings=RLOO)
