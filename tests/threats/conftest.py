"""What tests of threats share: a tiny base model, and a recipe of it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe


@pytest.fixture
def recipe(tiny_base: str, scratch_recipe: dict[str, Any]) -> Recipe:
    """A recipe of the base model."""
    scratch_recipe["model"] = {"base": tiny_base}
    return load.validate(scratch_recipe, origin="r")
