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
    """Regular expression searched in parameter names, such as `lora_`, `embed_tokens` or `\\.gate\\.`. The first
    matching group applies."""
    name: str | None = None
    """Name in logs; default: the pattern."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate; default: `training.learning_rate`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; default: `training.weight_decay`."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradient norm limit of this group, applied after clipping of all."""

    _checked = field_validator("pattern")(require_pattern)


class Trainable(Section):
    """Weights trained in full; all others are frozen."""

    last_layers: Annotated[int, Field(ge=0)] = 0
    """Number of last transformer blocks to train."""
    patterns: list[str] = []
    """Regular expressions of further parameter names, such as `lm_head` or `norm`."""

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
    """Ends the run when evaluation stops improving; later chunks return at once."""

    patience: Positive = 3
    """Evaluations in a row without improvement."""
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """Smallest change that counts as improvement."""
    metric: str = "eval_loss"
    """Evaluation metric to watch."""
    greater_is_better: bool = False
    """Whether higher is better."""


class Curriculum(Section):
    """Easy rows first: the share of eligible rows grows with the step, given by seed and step alone."""

    by: str = "length"
    """`length` in tokens, or a numeric source column where higher is harder."""
    ramp: Literal["linear", "exponential", "step"] = "linear"
    """Growth of the share from `start` to all; `step` grows in `levels` jumps."""
    start: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of rows, easiest first, at the first step."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of all steps after which every row is eligible."""
    levels: Annotated[int, Field(ge=2)] = 4
    """Jumps of `step`."""


class Guard(Section):
    """Watches loss and gradient norm of each step. After a bad step the chunk resumes from the last checkpoint and
    skips it."""

    nan: bool = True
    """Skip steps with a non-finite loss or gradient norm, except those that the `fp16` scaler skips."""
    loss: Annotated[float, Field(gt=1)] | None = 3.0
    """Highest loss, as a multiple of the window's median; it must also exceed the window's maximum. Null: no limit.
    Ignored with `grpo` and `rloo`."""
    grad_norm: Annotated[float, Field(gt=1)] | None = 10.0
    """Same for the gradient norm before clipping."""
    window: Positive = 100
    """Recent steps that form the median, without skipped ones. Checks begin after 10 steps, or a smaller window."""
    max_skips: Annotated[int, Field(ge=0)] = 3
    """Bad steps to skip; one more ends the run and names their rows."""
    skip: list[Positive] = []
    """Known steps to skip; they do not count towards `max_skips`."""

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
    """Learning-rate range test before the first chunk (arXiv:1506.01186), on a temporary model. Its result replaces
    `training.learning_rate`."""

    start: Annotated[float, Field(gt=0)] = 1e-7
    """Learning rate of the first step."""
    end: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the last step."""
    steps: Annotated[int, Field(ge=10)] = 100
    """Number of steps; the test ends early at four times the lowest loss."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the moving average."""
    take: Literal["steepest", "tenth"] = "steepest"
    """`steepest`: the rate where smoothed loss falls fastest; `tenth`: a tenth of the rate at its minimum."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end {self.end:g} is not above start {self.start:g}")
        return self


class Router(Section):
    """Router losses for a mixture of experts, replacing the architecture's own; each a mean over layers."""

    balance: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the load-balancing loss `C · Σ fᵢ Pᵢ` (arXiv:2101.03961)."""
    unevenness: Annotated[float, Field(ge=0)] = 0.0
    """Weight of `Σ (fᵢ − 1/C)²`."""
    z: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the z-loss `mean(log² Σ exp)` (arXiv:2202.08906); usually 0.001."""


# Rows at once: few enough to find their divisors, for messages and estimates, at once.
Rows = Annotated[int, Field(gt=0, le=1_000_000)]
DECAYS = "warmup_stable_decay"
ANY_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")
"""Schedules in which no step's rate depends on the number of all steps."""
SECTIONS = tuple(name for name, spec in SPECS.items() if spec.settings)  # methods with a section of their own


class Training(Methods):
    """Schedule, optimizer and method."""

    batch_size: Rows = 8
    """Rows per optimizer step."""
    micro_batch_size: Rows | Literal["auto"] | None = None
    """Rows per forward pass, a divisor of `batch_size`; default: all. `auto`: the first chunk finds the largest that
    fits in memory, and the run keeps it."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows; default: 1, without `max_steps`."""
    max_steps: Positive | None = None
    """Optimizer steps, instead of `epochs`."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate."""
    lr_find: LRFind | None = None
    """Find the learning rate in a stage of its own."""
    lr_scheduler: Literal[
        "auto", "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
        "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
        "warmup_stable_decay", "greedy",
    ] = "linear"  # fmt: skip
    """Schedule over the whole run, independent of chunks, by its Transformers name. `auto`: with `budget`
    `warmup_stable_decay`, whose decay takes a tenth of `max_steps`, else `linear`."""
    lr_scheduler_options: dict[str, Any] = {}
    """Options of the schedule, by their Transformers names, such as `{num_cycles: 3}` or `{min_lr_rate: 0.1}`."""
    warmup_steps: Annotated[float, Field(ge=0)] = 0
    """Steps of linear warmup from 0; below 1, a share of all steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradient norm limit; 0 turns clipping off."""
    groups: list[Group] = []
    """Parameters with their own learning rate, weight decay or clipping."""
    optimizer: Literal[
        "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad",
        "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit", "paged_lion_8bit",
        "paged_lion_32bit", "ademamix", "ademamix_8bit", "paged_ademamix_8bit",
    ] = "adamw_torch"  # fmt: skip
    """Optimizer, by its Transformers name. `…_8bit`, `…_32bit` and `ademamix` need bitsandbytes. On CPUs
    their step is slower, and `paged_…` pages nothing."""
    adam_betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay rates of Adam's two moments."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's ε, added to the root of the second moment."""
    optimizer_options: dict[str, str | int | float | bool] = {}
    """Options of the optimizer, by their Transformers names (`optim_args`), such as `{momentum: 0.9}`."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward. `bf16` and `fp16`: mixed precision; `tf32`: `fp32` with `tf32: true`."""
    tf32: bool | None = None
    """Round inputs of 32-bit matrix products to TF32, on Ampere GPUs or newer. Default: on with `precision: tf32`, or
    in one process with `compile` and no `fp16`."""
    fp16_initial_scale: Annotated[float, Field(gt=0)] | None = None
    """First loss scale of `fp16`; default: 65536."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    activation_offloading: bool = False
    """Hold activations in host memory between forward and backward. For `sft`, `pretrain`, `reward`, `dpo` and
    `kto`."""
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False
    """`torch.compile` the model, by mode; true: `default`."""
    compile_optimizer: bool = False
    """`torch.compile` the optimizer step."""
    liger: bool = False
    """Use Liger kernels where the architecture has them; needs `liger-kernel` and a CUDA GPU."""
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """Noise on embeddings (NEFTune, arXiv:2310.05914); usually 5."""
    router: Router | None = None
    """Router losses for a mixture of experts; default: the architecture's own."""
    trainable: Trainable | None = None
    """Freeze all other weights; default: train all."""
    curriculum: Curriculum | None = None
    """Easy rows first."""
    group_by_length: bool = False
    """Batch rows of similar length for less padding. Seed and epoch give the order."""
    early_stopping: EarlyStopping | None = None
    """End the run when evaluation stops improving."""
    guard: Guard | None = None
    """Skip steps that would spoil the run; `{}` uses the defaults."""
    log_every: Positive = 1
    """Steps between logged losses."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that prepare batches."""
    threads: Positive | None = None
    """CPU threads of torch. Results depend on it; the first chunk fixes it for the run."""
    deterministic: bool = True
    """Refuse kernels with varying results."""
    parallel: Annotated[Parallel, shorthand("strategy")] | None = None
    """Several processes per pod; default: `ddp`, one for each of `resources.gpus`."""

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
                f"micro_batch_size: the loss of {spec.name} depends on it, and auto would let memory decide it; "
                "give a number"
            )
        if self.completions and self.lr_find:
            raise ValueError(f"lr_find: the loss of {spec.name} does not reflect the learning rate; remove it")
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
    def decay_steps(self) -> int | None:
        """Last steps in which the schedule ends; None for a shape over all steps, which cannot be shortened."""
        if self.lr_scheduler == DECAYS:
            steps = self.lr_scheduler_options.get("num_decay_steps")
            return steps if isinstance(steps, int) else 0
        return 0 if self.lr_scheduler in ANY_LENGTH else None

    @property
    def uses_bitsandbytes(self) -> bool:
        """Whether the optimizer is one of bitsandbytes'."""
        return self.optimizer.endswith(("_8bit", "_32bit", "ademamix"))

    @property
    def rows_at_once(self) -> int:
        """Rows of a forward pass with one process; see `Recipe.micro_batch_size_per_process`. Not for `auto`."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size or self.batch_size
