"""Settings of methods that let the model write during training."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from baton.components.shared.recipe.base import Positive, Section
from baton.components.shared.recipe.hooks import OBJECT, short
from baton.components.shared.recipe.methods.references import Referenced, Share

REWARDS = ("numeric", "exact", "format", "length", "information_gain")
"""Ready reward functions; see `components/shared/rewards/`."""


def listed(value: Any) -> Any:
    """Returns a text as a list of one."""
    return [value] if isinstance(value, str) else value


class RewardFunction(Section):
    """What judges a completion."""

    use: str
    """A ready one (`numeric`, `exact`, `format`, `length`, `information_gain`) or `module:object`, called as TRL calls
    reward functions: with `prompts`, `completions` and the row's columns as lists; returns a list of numbers. Of a row
    whose prompt is a text, prompts and completions are texts, also where the model sees a conversation; else they are
    lists of messages."""
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
    """Sample from the most likely tokens of this much probability. Below 1 on a GPU only without
    `training.deterministic`: CUDA has no deterministic kernel for it."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many most likely tokens; 0 for all."""
    min_p: Share | None = None
    """Leave out tokens below this share of the most likely one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1, tokens that occurred become less likely."""
    disable_dropout: bool = False
    """Train without the model's own dropout."""


class Generation(Completions, Referenced):
    """Completions of each prompt that are compared with each other, and what judges them."""

    rewards: Annotated[list[Annotated[RewardFunction, short("use")]], Field(min_length=1), BeforeValidator(listed)]
    """Reward functions; their weighted sum counts."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt, compared with each other. `batch_size` counts completions and must be a multiple."""
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


OWN_ORDER = "repeats prompts in its own order"
ROUND = {"step": "_step", "completions": "_buffered_inputs"}
"""What TRL's trainers that write keep between steps: micro-batches so far, and completions still to be trained on."""
