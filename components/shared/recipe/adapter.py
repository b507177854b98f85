"""Adapters."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from baton.components.shared.recipe.base import Positive, Section, require_pattern


class Adapter(Section):
    """A low-rank adapter trained in place of the full weights; with `model.quantization` it is QLoRA."""

    type: Literal["lora"] = "lora"
    """Kind of adapter."""
    r: Positive = 16
    """Rank of the update matrices."""
    alpha: Positive = 32
    """Scale: the update is multiplied by `alpha / r`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] | str | None = None
    """Names of layers, a pattern, or `all-linear`; PEFT's default for the architecture when left out."""
    exclude_modules: list[str] | str | None = None
    """Names of layers or a pattern to leave out."""
    target_parameters: list[str] | None = None
    """Parameters that are no layers, such as the experts of a mixture."""
    modules_to_save: list[str] | None = None
    """Layers trained in full beside the adapter, such as `lm_head`."""
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = None
    """Numbers of the blocks that get an adapter; all when left out."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained."""
    rslora: bool = False
    """Scale by `alpha / √r` (arXiv:2312.03732)."""
    dora: bool = False
    """Split weights into direction and magnitude (arXiv:2402.09353)."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """How the matrices start."""
    rank_pattern: dict[str, Positive] = {}
    """Rank by pattern of layer name, where it differs."""
    alpha_pattern: dict[str, Positive] = {}
    """Alpha by pattern of layer name, where it differs."""

    @property
    def adapts_head(self) -> bool:
        """Whether PEFT would put an adapter on `lm_head`."""
        if _names_head(self.exclude_modules) or _names_head(self.modules_to_save):
            return False
        # A list of blocks leaves out what is in none of them.
        in_blocks = self.layers_to_transform and isinstance(self.target_modules, list)
        weights = self.target_parameters or ()
        return "lm_head.weight" in weights or (_names_head(self.target_modules) and not in_blocks)

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _is_pattern(cls, value: list[str] | str | None) -> list[str] | str | None:
        return require_pattern(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Adapter:
        if self.dora and self.target_parameters:
            raise ValueError("dora does not work with target_parameters; leave one out")
        return self


def _names_head(modules: list[str] | str | None) -> bool:
    return bool(re.fullmatch(modules, "lm_head")) if isinstance(modules, str) else "lm_head" in (modules or ())
