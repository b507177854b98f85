"""Settings of methods that hold the model to a reference."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.components.shared.recipe.base import Positive, Section

Coefficient = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class SyncReference(Section):
    """Lets the reference follow the model (TR-DPO, arXiv:2404.09656)."""

    every: Positive = 512
    """Steps between updates."""
    mix: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the model in the new reference."""


class Referenced(Section):
    """Settings of a method whose loss compares the model with a reference."""

    beta: Coefficient
    """How strongly the reference holds the model; 0 needs none."""
    sync_reference: SyncReference | None = None
    """Let the reference follow; it is then part of each checkpoint. Full weights only."""
