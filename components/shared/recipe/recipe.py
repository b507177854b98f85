"""The whole recipe."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from baton.components.shared.recipe import rules
from baton.components.shared.recipe.sections import Sections


class Recipe(Sections):
    """One training run, from rows to an exported model."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        rules.check(self)
        return self
