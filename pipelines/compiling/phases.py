"""The trainings of a recipe, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from baton.components.shared.recipe import Recipe, recipe_file


def parts_of(recipe: Recipe) -> Iterator[tuple[Recipe, str, bool]]:
    """Yields the trainings of a recipe, each with the end of its page's name and whether its tokens can be counted.

    Later phases count by the model that the first starts from, as they have its tokenizer; one that the first phase
    learns is not known to them here.
    """
    if not recipe.phases:
        yield recipe, "", True
    model = recipe.model
    base = model.base or (model.tokenizer and model.tokenizer.base)
    for phase, part in zip(recipe.phases, recipe.phase_recipes(), strict=True):
        is_first = phase is recipe.phases[0]
        document = part.model_dump(mode="json")
        if not is_first and base:
            document["model"]["base"] = base
        yield recipe_file.validate(document, origin=part.name), f"-{phase.name}", is_first or bool(base)
