"""What each training method has of its own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from components.shared.recipe.base import Positive, Section
from components.shared.recipe.hooks import OBJECT, short

REWARDS = ("numeric", "exact", "format", "length", "information_gain")
"""Ready reward functions; see `components/train_chunk/rewards/`."""

Coefficient = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SyncReference(Section):
    """Lets the reference follow the model (TR-DPO, arXiv:2404.09656)."""

    every: Positive = 512
    """Steps between updates."""
    mix: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the model in the new reference."""


class Reward(Section):
    """Reward modelling: a score per answer, trained on pairs (Bradley–Terry)."""

    center_coefficient: Coefficient | None = None
    """Weight of the term that keeps rewards around zero (arXiv:2312.09244); 0.01 is usual."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


class DPO(Section):
    """Direct preference optimisation (arXiv:2305.18290)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the reference holds the model."""
    loss: Annotated[
        list[
            Literal[
                "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
                "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
            ]
        ],
        BeforeValidator(_listed, json_schema_input_type=str | list[str]),
        Field(min_length=1),
    ] = ["sigmoid"]  # fmt: skip
    """One loss or several that are added, by TRL's names."""
    loss_weights: list[float] | None = None
    """Weight of each; 1 when left out."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be labelled the wrong way round, for `robust`; ε for `exo_pair`."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence from the reference (arXiv:2309.16240)."""
    weighting: bool = False
    """Weigh pairs by the model's own probability of them (WPO, arXiv:2406.11827)."""
    length_desensitization: Share | None = None
    """α of LD-DPO (arXiv:2409.06411): weight of the tokens beyond the shorter answer's length."""
    sync_reference: SyncReference | None = None
    """Let the reference follow; it is then part of each checkpoint. Full weights only."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> DPO:
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} values for {len(self.loss)} losses")
        if "exo_pair" in self.loss and self.label_smoothing == 0:
            raise ValueError("loss exo_pair needs label_smoothing above 0; 0.001 is usual")
        return self


class KTO(Section):
    """Kahneman–Tversky optimisation on single answers that are good or bad (arXiv:2402.01306)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the reference holds the model."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Loss, by TRL's names."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of good answers."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of bad answers."""
    sync_reference: SyncReference | None = None
    """Let the reference follow; it is then part of each checkpoint. Full weights only."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


class ORPO(Section):
    """Odds-ratio preference optimisation, without a reference (arXiv:2403.07691)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds ratio beside the likelihood of the chosen answer (λ in the paper)."""
    disable_dropout: bool = True
    """Train without the model's own dropout."""


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


class RewardFunction(Section):
    """What judges a completion."""

    use: str
    """A ready one (`numeric`, `exact`, `format`, `length`, `information_gain`) or `module:object`, called as TRL calls
    reward functions: with `prompts`, `completions` and the row's columns as lists; returns a list of numbers."""
    weight: float = 1.0
    """Factor in the sum of rewards."""
    options: dict[str, Any] = {}
    """Further keyword arguments."""

    @field_validator("use")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in REWARDS and not re.match(OBJECT, value):
            raise ValueError(f"is {value!r}; expected one of {', '.join(REWARDS)}, or module:object")
        return value


class Generation(Section):
    """Completions that the model writes during training, and what judges them."""

    rewards: Annotated[list[Annotated[RewardFunction, short("use")]], Field(min_length=1), BeforeValidator(_listed)]
    """Reward functions; their weighted sum counts."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt, compared with each other. `batch_size` counts completions and must be a multiple."""
    max_completion_length: Positive = 256
    """Longest completion in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens of this much probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many most likely tokens; 0 for all."""
    min_p: Share | None = None
    """Leave out tokens below this share of the most likely one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1, tokens that occurred become less likely."""
    num_iterations: Positive = 1
    """Times each batch of completions is trained on (μ)."""
    steps_per_generation: Positive | None = None
    """Micro-batches, of all processes, that one round of generation fills; those of an optimizer step when left out."""
    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """Clipping range of the probability ratio."""
    epsilon_high: Annotated[float, Field(gt=0)] | None = None
    """Its upper side, where it differs (DAPO, arXiv:2503.14476)."""
    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss."""
    sync_reference: SyncReference | None = None
    """Let the reference follow; it is then part of each checkpoint. Full weights only, `beta` above 0."""
    disable_dropout: bool = False
    """Train without the model's own dropout."""


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


class RLOO(Generation):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    beta: Coefficient = 0.05
    """Weight of the divergence from the start model, taken off the reward; 0 needs no reference."""
    normalize_advantages: bool = False
    """Bring the advantages of a batch to mean 0 and variance 1."""
