"""Recipe section `training`: schedule, optimizer, trained weights, and changes on the way."""

from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from baton.recipe.base import Positive, Section, require_pattern
from baton.recipe.cluster import Parallel
from baton.recipe.methods import SPECS, Methods
from baton.recipe.run import shorthand


class Group(Section):
    """Parameters with their own learning rate, weight decay or clipping."""

    pattern: str
    """Regular expression found in the parameter's name, such as `lora_`, `embed_tokens` or `\\.gate\\.`; the first
    group that fits counts."""
    name: str | None = None
    """Name in the logs; the pattern when left out."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate; `training.learning_rate` when left out."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; `training.weight_decay` when left out."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Norm above which this group's gradients are scaled down, after the clipping of all."""

    _checked = field_validator("pattern")(require_pattern)


class Trainable(Section):
    """Which of the full weights are trained; the others are frozen."""

    last_layers: Annotated[int, Field(ge=0)] = 0
    """The last so many transformer blocks."""
    patterns: list[str] = []
    """And every parameter in whose name one of these regular expressions is found, such as `lm_head` or `norm`."""

    @field_validator("patterns")
    @classmethod
    def _are_patterns(cls, value: list[str]) -> list[str]:
        return [require_pattern(pattern) for pattern in value]

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.last_layers and not self.patterns:
            raise ValueError("nothing would be trained; give last_layers or patterns, or remove trainable")
        return self


class EarlyStopping(Section):
    """Ends the run when evaluation stops improving; chunks after that return at once."""

    patience: Positive = 3
    """Evaluations in a row without improvement."""
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """Improvement that counts as one."""
    metric: str = "eval_loss"
    """Value of the evaluation that is watched."""
    greater_is_better: bool = False
    """Whether more is better."""


class Curriculum(Section):
    """Easy rows first: which rows may be drawn grows from step to step, as a function of seed and step alone."""

    by: str = "length"
    """`length` in tokens, or a column of the source that holds a number, more being harder."""
    ramp: Literal["linear", "exponential", "step"] = "linear"
    """How the share of rows grows from `start` to all; `step` in `levels` jumps."""
    start: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of rows, the easiest, at the first step."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of all steps after which every row may be drawn."""
    levels: Annotated[int, Field(ge=2)] = 4
    """Jumps of `step`."""


class Guard(Section):
    """Watches each step's loss and gradient norm. One that is out of bounds is taken back: the chunk resumes from the
    newest checkpoint before that step, and skips it."""

    nan: bool = True
    """Whether a step is skipped whose loss or gradient norm is not finite; what `fp16`'s scaler passes over is not."""
    loss: Annotated[float, Field(gt=1)] | None = 3.0
    """How many times the median of the window a step's loss may be, where it is also above all in the window; null for
    any. Not looked at with `grpo` and `rloo`, whose loss is about 0."""
    grad_norm: Annotated[float, Field(gt=1)] | None = 10.0
    """The same for the norm of its gradients before clipping."""
    window: Positive = 100
    """Steps that are remembered: the last so many that were not skipped. Nothing is held to their median before there
    are 10, or as many as are remembered."""
    max_skips: Annotated[int, Field(ge=0)] = 3
    """Steps that may be found and skipped; one more ends the run, which names their rows."""
    skip: list[Positive] = []
    """Steps to skip that are known from the start; they do not count as found."""

    @field_validator("skip")
    @classmethod
    def _in_order(cls, value: list[int]) -> list[int]:
        return sorted(set(value))

    @model_validator(mode="after")
    def _watches(self) -> Self:
        if not (self.nan or self.loss or self.grad_norm or self.skip):
            raise ValueError("nothing would be watched or skipped; set nan, loss or grad_norm, or remove guard")
        return self


class LRFind(Section):
    """A learning-rate range test before the first chunk (arXiv:1506.01186): the rate grows from step to step on a model
    that is thrown away, and the one found stands in place of `training.learning_rate`."""

    start: Annotated[float, Field(gt=0)] = 1e-7
    """Learning rate of the first step."""
    end: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the last step."""
    steps: Annotated[int, Field(ge=10)] = 100
    """Steps; the test ends earlier where the loss leaves four times its lowest value."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the moving average that stays at each step."""
    take: Literal["steepest", "tenth"] = "steepest"
    """The rate where the smoothed loss falls fastest, or a tenth of that where it is lowest."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end {self.end:g} is not above start {self.start:g}")
        return self


class Router(Section):
    """Losses on the router of a mixture of experts, in place of the architecture's own; each a mean over layers."""

    balance: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the load-balancing loss `C · Σ fᵢ Pᵢ` (arXiv:2101.03961)."""
    unevenness: Annotated[float, Field(ge=0)] = 0.0
    """Weight of `Σ (fᵢ − 1/C)²`."""
    z: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the z-loss `mean(log² Σ exp)` (arXiv:2202.08906); 0.001 is usual."""


# Rows at once: few enough to find their divisors, for messages and estimates, at once.
Rows = Annotated[int, Field(gt=0, le=1_000_000)]
SECTIONS = tuple(name for name, spec in SPECS.items() if spec.settings)  # methods with a section of their own


class Training(Methods):
    """How the model learns."""

    batch_size: Rows = 8
    """Rows per optimizer step: what the optimizer sees."""
    micro_batch_size: Rows | Literal["auto"] | None = None
    """Rows per forward pass: what memory sees. Must divide `batch_size`; equal to it when left out. With `auto` the
    first chunk finds the most that memory takes, and the run keeps to it."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows; 1 when neither this nor `max_steps` is given."""
    max_steps: Positive | None = None
    """Optimizer steps, instead of `epochs`."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate."""
    lr_find: LRFind | None = None
    """Find the learning rate in a separate stage; `learning_rate` holds when left out."""
    lr_scheduler: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
    ] = "linear"  # fmt: skip
    """Learning-rate schedule over the whole run, whatever the chunks; by its Transformers name."""
    lr_scheduler_options: dict[str, Any] = {}
    """The schedule's own settings by their Transformers names, such as `{num_cycles: 3}` or `{min_lr_rate: 0.1}`."""
    warmup_steps: Annotated[float, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0; below 1, a share of all steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradient norm above which gradients are scaled down; 0 turns clipping off."""
    groups: list[Group] = []
    """Parameters with their own learning rate, weight decay or clipping."""
    optimizer: Literal[
        "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad",
        "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit", "paged_lion_8bit",
        "paged_lion_32bit", "ademamix", "ademamix_8bit", "paged_ademamix_8bit",
    ] = "adamw_torch"  # fmt: skip
    """Optimizer, by its Transformers name; those with bits in their name need bitsandbytes and a CUDA GPU."""
    adam_betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Adam's decay rates of the two moments."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's ε, added to the root of the second moment."""
    optimizer_options: dict[str, str | int | float | bool] = {}
    """The optimizer's own settings by their Transformers names (`optim_args`), such as `{momentum: 0.9}`."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward; `bf16` and `fp16` are mixed precision, `tf32` is `fp32` with `tf32: true`."""
    tf32: bool | None = None
    """Round what matrix products read in 32 bits to TF32, also what `bf16` and `fp16` leave in 32 bits; needs an Ampere
    GPU or a newer one. When left out, only where `precision` says so or one process has `compile` and no `fp16`."""
    fp16_initial_scale: Annotated[float, Field(gt=0)] | None = None
    """First loss scale of `fp16`; 65536 when left out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    activation_offloading: bool = False
    """Hold activations in the host's memory between forward and backward; with `sft`, `pretrain`, `reward`, `dpo` and
    `kto`, whose trainers can."""
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False
    """`torch.compile` the model, by mode; true for `default`."""
    compile_optimizer: bool = False
    """`torch.compile` the optimizer's step."""
    liger: bool = False
    """Use Liger's kernels where they exist for the architecture; needs `liger-kernel` and a CUDA GPU."""
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """Noise on the embeddings in training (NEFTune, arXiv:2310.05914); 5 is usual."""
    router: Router | None = None
    """Losses on the router of a mixture of experts; the architecture's own when left out."""
    trainable: Trainable | None = None
    """Freeze all weights but these; everything is trained when left out."""
    curriculum: Curriculum | None = None
    """Easy rows first."""
    group_by_length: bool = False
    """Bring rows of about the same length together: less padding. The order is a function of seed and epoch."""
    early_stopping: EarlyStopping | None = None
    """End the run when evaluation stops improving."""
    guard: Guard | None = None
    """Skip steps that would spoil the run; nothing is watched when left out, and `{}` watches by the defaults."""
    log_every: Positive = 1
    """Steps between logged losses."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that prepare batches."""
    threads: Positive | None = None
    """CPU threads of torch. Bits depend on it, so the first chunk's number holds for the run."""
    deterministic: bool = True
    """Refuse kernels whose result varies from call to call."""
    parallel: Annotated[Parallel, shorthand("strategy")] | None = None
    """Several processes per pod; when left out, `ddp` with one for each of `resources.gpus`."""

    @model_validator(mode="before")
    @classmethod
    def _own_section(cls, value: Any) -> Any:
        """Gives the chosen method its section where it can be left out."""
        if not isinstance(value, dict):
            return value
        method = value.get("method", "sft")
        spec = SPECS.get(method) if isinstance(method, str) else None
        if spec and spec.settings and not spec.requires and value.get(method) is None:
            return {**value, method: {}}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("give epochs or max_steps, not both")
        if isinstance(self.micro_batch_size, int) and self.batch_size % self.micro_batch_size:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide batch_size {self.batch_size}; "
                f"choose one of {', '.join(map(str, divisors))}"
            )
        for name in SECTIONS:
            if name != self.method and getattr(self, name) is not None:
                raise ValueError(f"{name} has settings, but method is {self.method}; remove them or set method: {name}")
        if self.curriculum and self.group_by_length:
            raise ValueError("curriculum and group_by_length both decide the order of rows; leave one out")
        if self.guard and self.max_steps and any(step > self.max_steps for step in self.guard.skip):
            raise ValueError(f"guard.skip: step {max(self.guard.skip)} is after the last, max_steps {self.max_steps}")
        if self.fp16_initial_scale and self.precision != "fp16":
            raise ValueError(f"fp16_initial_scale is for precision fp16, not {self.precision}")
        if self.precision == "tf32" and self.tf32 is False:
            raise ValueError("precision: tf32 and tf32: false contradict each other; use precision: fp32")
        return self

    @model_validator(mode="after")
    def _method_fits(self) -> Self:
        spec = self.spec
        if self.settings is None and spec.requires:
            example = yaml.safe_dump({spec.name: dict(spec.example)}, default_flow_style=True).strip()[1:-1]
            raise ValueError(f"{spec.name} needs {spec.requires}; give {example}")
        if self.micro_batch_size == "auto" and spec.micro_batch_decides_loss:
            raise ValueError(
                f"micro_batch_size: the loss of {spec.name} depends on it, so auto would let memory decide what is "
                "learned; give a number"
            )
        if self.completions and self.lr_find:
            raise ValueError(f"lr_find: the loss of {spec.name} says nothing about the learning rate; leave it out")
        if self.generation and self.round_size % self.generation.num_generations:
            raise ValueError(
                f"{spec.name}.num_generations {self.generation.num_generations} does not divide the {self.round_size} "
                "completions of a round (micro-batch size × steps_per_generation); change one of them"
            )
        if self.kto and self.kto.loss == "kto" and self.rows_at_once < 2:
            raise ValueError("kto estimates a divergence within each micro-batch; use micro_batch_size 2 or more")
        if spec.own_order and (self.curriculum or self.group_by_length):
            raise ValueError(f"{spec.name} {spec.own_order}; leave out curriculum and group_by_length")
        return self

    @property
    def round_size(self) -> int:
        """Completions of one round, of all processes together; 0 where the model does not write."""
        if self.completions is None:
            return 0
        steps = self.generation.steps_per_generation if self.generation else None
        return self.rows_at_once * steps if steps else self.batch_size

    @property
    def rows_at_once(self) -> int:
        """Rows of a forward pass with one process; see `Recipe.micro_batch_size_per_process`. Not for `auto`."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size or self.batch_size
