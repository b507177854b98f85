"""Group-relative policy optimisation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.components.shared.recipe.methods.completions import OWN_ORDER, ROUND, Generation
from baton.components.shared.recipe.methods.references import Coefficient
from baton.components.shared.recipe.methods.spec import START_COPY, MethodSpec


class GRPO(Generation):
    """Group-relative policy optimisation (arXiv:2402.03300)."""

    beta: Coefficient = 0.0
    """Weight of the divergence from the start model; 0 needs no reference."""
    loss: Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """How token losses are brought together, by TRL's names."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the spread in the group, in the batch, or nothing."""
    importance_sampling: Literal["token", "sequence"] = "token"
    """Ratio per token, or per sequence as in GSPO (arXiv:2507.18071)."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of tokens, the most uncertain ones, that count in the loss (arXiv:2506.01939)."""


SPEC = MethodSpec(
    name="grpo",
    settings=GRPO,
    requires="a reward",
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
