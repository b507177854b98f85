"""Direct preference optimisation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from baton.components.shared.recipe.methods.completions import listed
from baton.components.shared.recipe.methods.references import Referenced, Share
from baton.components.shared.recipe.methods.spec import AGAINST_BASELINE, PREFERENCES, START_COPY, MethodSpec


class DPO(Referenced):
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
        BeforeValidator(listed, json_schema_input_type=str | list[str]),
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
    disable_dropout: bool = True
    """Train without the model's own dropout."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> DPO:
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} values for {len(self.loss)} losses")
        if "exo_pair" in self.loss and self.label_smoothing == 0:
            raise ValueError("loss exo_pair needs label_smoothing above 0; 0.001 is usual")
        return self


SPEC = MethodSpec(
    name="dpo",
    settings=DPO,
    formats=PREFERENCES,
    rows="pairs",
    sequences_per_row=2,
    offloads_activations=True,
    second_model=START_COPY,
    figures=("loss", "perplexity", *AGAINST_BASELINE),
    logged={
        "rewards/margins": "reward margin",
        "rewards/accuracies": "preference accuracy",
        "kl": "KL",
        "logps/chosen": "log p, chosen",
        "logps/reference_chosen": "log p, chosen, reference",
        "logps/rejected": "log p, rejected",
        "logps/reference_rejected": "log p, rejected, reference",
    },
    forkable=("beta", "label_smoothing"),
)
