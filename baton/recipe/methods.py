"""The training methods: settings and `MethodSpec` of each, in `SPECS` by name.

A new method needs settings, spec and a field in `Methods` here, its trainer in `baton/train/methods/` and its row in
`tests/exactness/matrix.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from baton.recipe.base import Positive, Section
from baton.recipe.model import NamedModel
from baton.recipe.run import OBJECT, shorthand

# Tokenized rows: a sequence with labels, a prompt with two answers, two whole texts, a prompt with one answer and its
# label, or a prompt alone.
Rows = Literal["sequences", "pairs", "scored", "rated", "prompts"]
Strategy = Literal["ddp", "fsdp", "zero2", "zero3"]

PREFERENCES = ("preference", "ranked")  # formats with a better and a worse answer
# Figures that compare a model's likelihoods of pairs with the untrained model's.
AGAINST_BASELINE = ("reward_accuracy", "reward_margin")


@dataclass(frozen=True, kw_only=True)
class SecondModel:
    """A second model, not trained itself."""

    name: str  # its role: `reference` or `teacher`
    # Whether the method's settings name it, in a field called after its role. It is then fetched, pinned by digest and
    # compared at each chunk, like `model.base`. Else it is a copy of the start model, held where `beta` is above 0 and
    # there is no adapter to switch off instead.
    is_named: bool = False


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """One training method."""

    name: str  # as in `training.method`; the module in `baton.train.methods` that builds its trainer has the same name
    settings: type[Section] | None = None  # class of its section in `training`, None where it has none
    requires: str | None = None  # what its section cannot leave out, in words; None where every setting has a default
    example: Mapping[str, str | list[str]] = field(default_factory=dict)  # the least settings it takes
    formats: tuple[str, ...]  # shapes of source rows it learns from, the usual one first
    rows: Rows  # kind of tokenized rows
    sequences_per_row: int = 1  # sequences that a row is in a forward pass
    scores: bool = False  # whether the model scores texts, with one label, instead of writing them
    takes_loss: bool = False  # whether `hooks.loss` can replace its loss
    # Whether the loss is a sum over the tokens of a step; else it is a mean over a micro-batch's rows.
    counts_tokens: bool = False
    micro_batch_decides_loss: bool = False  # whether the loss depends on the rows that share a forward pass
    own_order: str | None = None  # how it orders rows itself, in words; None where the recipe decides
    needs_all_rows: bool = False  # whether its trainer goes over all training rows in every chunk
    strategies: tuple[Strategy, ...] = ("ddp", "fsdp")  # strategies of `training.parallel` it was compared with
    offloads_activations: bool = False  # whether its trainer honours `training.activation_offloading`
    tiles_logits: bool = True  # whether its trainer multiplies by the head's weights itself, in tiles
    second_model: SecondModel | None = None  # a second model, if the method holds one
    # Values its trainer keeps between steps and `Trainer` does not save: name in a checkpoint → attribute.
    buffers: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[str, ...] = ("loss", "perplexity")  # measures on held-out rows
    # Logged values that the report plots with the loss, the most telling first: key → label.
    logged: Mapping[str, str] = field(default_factory=dict)
    forkable: tuple[str, ...] = ()  # its settings that a warm fork may change; each changes the loss from there on
    # Learning rate of a starter recipe and the reason, for all weights and for LoRA.
    rates: tuple[tuple[float, str], tuple[float, str]]

    @property
    def generates(self) -> bool:
        """Whether the model writes the texts it learns from; each rank holds its own share of a round."""
        return self.rows == "prompts"

    @property
    def is_judged_by_rewards(self) -> bool:
        """Whether the figures are rewards, one for each function among them."""
        return "reward" in self.figures


START_COPY = SecondModel(name="reference")  # a reference that is the model at the run's start


Coefficient = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class SyncReference(Section):
    """Moves the reference towards the model (TR-DPO, arXiv:2404.09656)."""

    every: Positive = 512
    """Steps between updates."""
    mix: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the model in the new reference."""


class Referenced(Section):
    """Settings of a method whose loss compares the model with a reference."""

    beta: Coefficient
    """Penalty for divergence from the reference; 0 needs none."""
    sync_reference: SyncReference | None = None
    """Move the reference along; checkpoints then hold it. Full weights only."""


# Ready reward functions; see `baton/models/rewards.py`.
REWARDS = ("numeric", "exact", "format", "length", "information_gain")


def listed(value: Any) -> Any:
    """Returns a text as a list of one."""
    return [value] if isinstance(value, str) else value


class RewardFunction(Section):
    """A function that scores completions."""

    use: str
    """Built-in (`numeric`, `exact`, `format`, `length`, `information_gain`) or `module:object` with TRL's interface. It
    takes `prompts`, `completions` and the row's columns as lists, and returns a list of numbers. Prompts and
    completions are texts where the row's prompt is a text, otherwise lists of messages."""
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


class Completions(Section):
    """Completions that the model writes during training."""

    max_completion_length: Positive = 256
    """Longest completion in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass to sample from. On a GPU, below 1 needs `training.deterministic: false`: CUDA has no
    deterministic kernel."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most likely tokens to sample from; 0: all."""
    min_p: Share | None = None
    """Drop tokens below this share of the highest probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1, repeated tokens become less likely."""
    disable_dropout: bool = False
    """Train without the model's dropout."""


class Generation(Completions, Referenced):
    """Completions of each prompt that are compared with each other, and what judges them."""

    rewards: Annotated[list[Annotated[RewardFunction, shorthand("use")]], Field(min_length=1), BeforeValidator(listed)]
    """Reward functions; their weighted sum counts."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt. `batch_size` counts completions and must be a multiple."""
    num_iterations: Positive = 1
    """Passes over each batch of completions (μ)."""
    steps_per_generation: Positive | None = None
    """Micro-batches of all processes per round of generation; default: those of one optimizer step."""
    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """Clipping range of the probability ratio."""
    epsilon_high: Annotated[float, Field(gt=0)] | None = None
    """Upper side of the range, if different (DAPO, arXiv:2503.14476)."""
    mask_truncated: bool = False
    """Exclude completions at the length limit from the loss."""


OWN_ORDER = "repeats prompts in its own order"
# State of TRL's generating trainers between steps: micro-batches so far, and unused completions.
ROUND = {"step": "_step", "completions": "_buffered_inputs"}


SFT_SPEC = MethodSpec(
    name="sft",
    formats=("text", "prompt-completion", "instruction", "messages", "sharegpt", "tool-calls"),
    rows="sequences",
    takes_loss=True,
    counts_tokens=True,
    strategies=("ddp", "fsdp", "zero2", "zero3"),
    offloads_activations=True,
    logged={"entropy": "entropy", "mean_token_accuracy": "token accuracy"},
    rates=((2e-5, "usual for all weights"), (2e-4, "usual for LoRA, ten times that of all weights")),
)


PRETRAIN_SPEC = replace(
    SFT_SPEC,
    name="pretrain",
    formats=("text",),
    rates=((2e-5, "usual for going on from a trained model"), (1e-4, "usual for LoRA")),
)


class Reward(Section):
    """Reward modelling: a score per answer, trained on pairs (Bradley–Terry)."""

    center_coefficient: Coefficient | None = None
    """Weight of the term that centres rewards at zero (arXiv:2312.09244); usually 0.01."""
    disable_dropout: bool = True
    """Train without the model's dropout."""


REWARD_SPEC = MethodSpec(
    name="reward",
    settings=Reward,
    formats=PREFERENCES,
    rows="scored",
    sequences_per_row=2,
    scores=True,
    offloads_activations=True,
    figures=("loss", "accuracy", "margin"),
    logged={"margin": "score margin", "accuracy": "accuracy"},
    rates=((1e-5, "usual for a reward model"), (1e-4, "usual for a reward model with LoRA")),
)


class DPO(Referenced):
    """Direct preference optimisation (arXiv:2305.18290)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Penalty for divergence from the reference."""
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
    """Losses to add, by TRL's names."""
    loss_weights: list[float] | None = None
    """Weight of each loss; default: 1."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """For `robust`, the assumed share of mislabelled pairs; for `exo_pair`, ε."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence from the reference (arXiv:2309.16240)."""
    weighting: bool = False
    """Weigh pairs by the model's own probability (WPO, arXiv:2406.11827)."""
    length_desensitization: Share | None = None
    """α of LD-DPO (arXiv:2409.06411): weight of tokens beyond the shorter answer's length."""
    disable_dropout: bool = True
    """Train without the model's dropout."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} values for {len(self.loss)} losses")
        if "exo_pair" in self.loss and self.label_smoothing == 0:
            raise ValueError("loss exo_pair needs label_smoothing above 0; 0.001 is usual")
        return self


DPO_SPEC = MethodSpec(
    name="dpo",
    settings=DPO,
    formats=PREFERENCES,
    rows="pairs",
    sequences_per_row=2,
    offloads_activations=True,
    second_model=START_COPY,
    figures=("loss", "perplexity", "accuracy", *AGAINST_BASELINE),
    logged={
        "rewards/margins": "reward margin",
        "rewards/accuracies": "reward accuracy",
        "kl": "KL",
        "logps/chosen": "log p, chosen",
        "logps/reference_chosen": "log p, chosen, reference",
        "logps/rejected": "log p, rejected",
        "logps/reference_rejected": "log p, rejected, reference",
    },
    forkable=("beta", "label_smoothing"),
    rates=((5e-7, "DPO takes small ones, 5e-7 to 5e-6"), (5e-6, "DPO takes small ones, with LoRA too")),
)


class KTO(Referenced):
    """Kahneman–Tversky optimisation on single answers, good or bad (arXiv:2402.01306)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Penalty for divergence from the reference."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Loss, by TRL's name."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of good answers."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of bad answers."""
    disable_dropout: bool = True
    """Train without the model's dropout."""


KTO_SPEC = MethodSpec(
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
    rates=(
        (5e-7, "KTO's authors advise 5e-7 to 5e-6"),
        (5e-6, "KTO's authors advise 5e-7 to 5e-6; LoRA takes the upper end"),
    ),
)


class ORPO(Section):
    """Odds-ratio preference optimisation without a reference (arXiv:2403.07691)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds ratio, added to the chosen answer's likelihood (λ in the paper)."""
    disable_dropout: bool = True
    """Train without the model's dropout."""


ORPO_SPEC = MethodSpec(
    name="orpo",
    settings=ORPO,
    formats=PREFERENCES,
    rows="pairs",
    sequences_per_row=2,
    needs_all_rows=True,
    tiles_logits=False,
    figures=("loss", "perplexity", "accuracy", *AGAINST_BASELINE),
    logged={"rewards/margins": "reward margin", "rewards/accuracies": "reward accuracy"},
    forkable=("beta",),
    rates=((8e-6, "that of the ORPO paper"), (8e-5, "ten times that of the ORPO paper, for LoRA")),
)


class CPO(Section):
    """Contrastive preference optimisation without a reference (arXiv:2401.08417), and SimPO (arXiv:2405.14734)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Steepness of the preference loss."""
    loss: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """Loss, by TRL's name."""
    likelihood: Coefficient = 1.0
    """Weight of the chosen answer's likelihood; 0 for pure SimPO."""
    simpo_margin: Coefficient = 0.5
    """Target margin γ of `simpo`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of mislabelled pairs."""
    disable_dropout: bool = True
    """Train without the model's dropout."""


CPO_SPEC = replace(
    ORPO_SPEC,
    name="cpo",
    settings=CPO,
    forkable=("beta", "label_smoothing"),
    rates=((1e-6, "usual for CPO"), (1e-5, "usual for CPO with LoRA")),
)


class GRPO(Generation):
    """Group-relative policy optimisation (arXiv:2402.03300)."""

    beta: Coefficient = 0.0
    """Weight of the divergence from the start model; 0 needs no reference."""
    loss: Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """Aggregation of token losses, by TRL's names."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the spread of the group, of the batch, or by nothing."""
    importance_sampling: Literal["token", "sequence"] = "token"
    """Ratio per token, or per sequence as in GSPO (arXiv:2507.18071)."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of tokens in the loss, highest entropy first (arXiv:2506.01939)."""


GRPO_SPEC = MethodSpec(
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
    rates=((1e-6, "usual for rewards"), (1e-5, "usual for rewards with LoRA")),
)


class RLOO(Generation):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    beta: Coefficient = 0.05
    """Weight of the divergence from the start model, subtracted from the reward; 0 needs no reference."""
    normalize_advantages: bool = False
    """Normalize advantages of a batch to mean 0 and variance 1."""


RLOO_SPEC = replace(GRPO_SPEC, name="rloo", settings=RLOO)


class Distillation(Completions):
    """On-policy distillation (arXiv:2306.13649): the model writes, then learns its teacher's token probabilities."""

    teacher: Annotated[NamedModel, shorthand("base")]
    """Model to learn from, with the same tokenizer and vocabulary; `teacher: org/model` sets its `base`."""
    beta: Share = 1.0
    """Divergence: 0 forward KL, 1 reverse KL, in between generalized Jensen–Shannon."""


DISTILLATION_SPEC = MethodSpec(
    name="distillation",
    settings=Distillation,
    requires="a teacher",
    example={"teacher": "org/model"},
    formats=("prompt",),
    rows="prompts",
    own_order=OWN_ORDER,
    needs_all_rows=True,
    second_model=SecondModel(name="teacher", is_named=True),
    buffers=ROUND,
    figures=("divergence",),
    logged={"completions/mean_length": "completion length", "entropy": "entropy"},
    forkable=("beta",),
    rates=((1e-5, "usual for all weights"), (1e-4, "usual for LoRA")),
)


# All specs of this module, in its order: the schema and messages list methods so.
SPECS: dict[str, MethodSpec] = {spec.name: spec for spec in list(globals().values()) if isinstance(spec, MethodSpec)}
# Methods whose settings name a teacher.
TAUGHT = tuple(name for name, spec in SPECS.items() if spec.second_model and spec.second_model.is_named)
if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[*SPECS]
# Sections in every written recipe, even empty. Later methods' are left out: runs' identities and compiled pipelines are
# made of that text, and a new method may change neither.
ALWAYS_WRITTEN = ("reward", "dpo", "kto", "orpo", "cpo", "grpo", "rloo")


class Methods(Section):
    """The part of `training` that differs by method: which one, and the section of each."""

    method: Method = "sft"
    """`sft`: supervised fine-tuning; `pretrain`: next-token prediction on plain text; `reward`: reward modelling.
    `dpo`, `kto`, `orpo`, `cpo`: preferences; `grpo`, `rloo`: rewards of completions; `distillation`: a teacher."""
    reward: Reward | None = None
    """Settings of `method: reward`."""
    dpo: DPO | None = None
    """Settings of `method: dpo`."""
    kto: KTO | None = None
    """Settings of `method: kto`."""
    orpo: ORPO | None = None
    """Settings of `method: orpo`."""
    cpo: CPO | None = None
    """Settings of `method: cpo`."""
    grpo: GRPO | None = None
    """Settings of `method: grpo`."""
    rloo: RLOO | None = None
    """Settings of `method: rloo`."""
    distillation: Distillation | None = None
    """Settings of `method: distillation`."""

    @model_serializer(mode="wrap")
    def _without_later_sections(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = handler(self)
        later = SPECS.keys() - ALWAYS_WRITTEN
        return {name: value for name, value in written.items() if value is not None or name not in later}

    @property
    def spec(self) -> MethodSpec:
        return SPECS[self.method]

    @property
    def settings(self) -> Section | None:
        """The method's own section, None where it has none."""
        return getattr(self, self.method, None)

    @property
    def completions(self) -> Completions | None:
        """Settings of a method that lets the model write."""
        return self.settings if isinstance(self.settings, Completions) else None

    @property
    def generation(self) -> Generation | None:
        """Settings of a method that judges the model's texts by rewards."""
        return self.settings if isinstance(self.settings, Generation) else None

    @property
    def second_model(self) -> tuple[str, NamedModel] | None:
        """Role and origin of a second model that the method's settings name."""
        second = self.spec.second_model
        named = getattr(self.settings, second.name) if second and second.is_named else None
        return (second.name, named) if second and isinstance(named, NamedModel) else None

    @property
    def sync_reference(self) -> SyncReference | None:
        return self.settings.sync_reference if isinstance(self.settings, Referenced) else None

    def has_reference(self, *, adapter: bool) -> bool:
        """Tells whether a copy of the start model is held; an adapter's reference is its base."""
        return isinstance(self.settings, Referenced) and self.settings.beta > 0 and not adapter
