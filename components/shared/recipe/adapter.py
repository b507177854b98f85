"""Adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.components.shared.recipe.base import Positive, Section


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

    @model_validator(mode="after")
    def _consistent(self) -> Adapter:
        if self.dora and self.target_parameters:
            raise ValueError("dora does not work with target_parameters; leave one out")
        return self
