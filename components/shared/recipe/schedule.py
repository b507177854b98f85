"""What changes in the course of training, and what is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from baton.components.shared.recipe.base import Positive, Section, require_pattern


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
    def _something(self) -> Trainable:
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
    def _watches(self) -> Guard:
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
    def _grows(self) -> LRFind:
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
