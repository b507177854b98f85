"""Recipes for programs: from a file, a mapping or YAML, with changes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.components.shared.recipe import Recipe
from baton.pipelines.compiling import origin, prepare
from baton.pipelines.compiling.origin import Origin

Overrides = Mapping[str, Any] | Sequence[str]
"""Changes to a recipe: dotted path → value, or `PATH=VALUE` lines as the command line takes them."""
Source = str | os.PathLike[str] | Mapping[str, Any] | Recipe
"""A recipe: path of a YAML file, name of a bundled one, YAML itself, plain values, or one that was read."""

HERE = "recipe"
"""What a recipe is called in messages that lies in no file; paths in it start at the working directory."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that was read and checked.

    Attributes:
        recipe: Its values, typed; see docs/recipe.md.
        origin: Where it comes from, and so where relative paths start.
    """

    recipe: Recipe
    origin: Origin

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    def localised(self) -> Recipe:
        """Returns the recipe as it runs on this machine, its paths absolute.

        Raises:
            UserError: a source or base model is missing.
        """
        return prepare.localise(self.recipe, self.origin)


def load(
    source: Source | LoadedRecipe,
    overrides: Overrides = (),
    *,
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    here: bool = True,
    trust: bool = False,
) -> LoadedRecipe:
    """Reads and checks a recipe.

    Args:
        source: Path or address of a YAML file, name of a bundled recipe, a YAML text, plain values, or a recipe that
            was read.
        overrides: Changes to it: `{"training.learning_rate": 1e-4}`, or `["training.learning_rate=1e-4"]`.
        store: URI instead of the recipe's.
        chunks: Number of chunks instead of the recipe's.
        image: Container image instead of the recipe's.
        here: Whether it runs on this machine, so that the profile `auto` can look at it.
        trust: Consent to run the code of a recipe from elsewhere, as it is now.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, or a value does not fit; it names each. Or nobody
            has consented to the code of a recipe from elsewhere.
    """
    changed = [*lines(overrides), *prepare.options(store, chunks, image)]
    if isinstance(source, LoadedRecipe) and not changed:
        return source
    found = _origin(source)
    found = replace(found, is_trusted=True) if trust else found
    return LoadedRecipe(prepare.load(found, changed, here=here), found)


def lines(overrides: Overrides) -> list[str]:
    """Returns changes as the command line takes them."""
    if isinstance(overrides, Mapping):
        return [f"{path}={json.dumps(value)}" for path, value in overrides.items()]  # JSON is YAML
    return list(overrides)


def _origin(source: Source | LoadedRecipe) -> Origin:
    if isinstance(source, LoadedRecipe):
        return replace(source.origin, values=_plain(source.recipe))
    if isinstance(source, Recipe):
        return Origin(HERE, "", os.getcwd(), _plain(source))
    if isinstance(source, Mapping):
        return Origin(HERE, "", os.getcwd(), source)
    if isinstance(source, str) and ("\n" in source or ": " in source) and not os.path.exists(source):
        return Origin(HERE, source, os.getcwd())
    return origin.find(os.fspath(source))


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude_defaults=True)
