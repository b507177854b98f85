"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from baton.components.shared.recipe.methods.completions import NEEDS_REWARDS, OWN_ORDER, ROUND, Generation
from baton.components.shared.recipe.methods.references import Coefficient
from baton.components.shared.recipe.methods.spec import START_COPY, MethodSpec


class RLOO(Generation):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    beta: Coefficient = 0.05
    """Weight of the divergence from the start model, taken off the reward; 0 needs no reference."""
    normalize_advantages: bool = False
    """Bring the advantages of a batch to mean 0 and variance 1."""


SPEC = MethodSpec(
    name="rloo",
    settings=RLOO,
    requires=NEEDS_REWARDS,
    example={"rewards": ["numeric"]},
    formats=("prompt",),
    rows="prompts",
    micro_batch_decides_loss=True,
    own_order=OWN_ORDER,
    needs_all_rows=True,
    second_model=START_COPY,
    buffers=ROUND,
    figures=("reward",),
    logged={"reward": "reward", "completions/mean_length": "completion length", "kl": "KL", "entropy": "entropy"},
)
