"""Numbers of processes that take turns: with virtual workers, another one for each chunk, or after each kill."""

from __future__ import annotations

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.run import Run


def parse(text: str | None, recipe: Recipe) -> list[int]:
    """Returns the numbers in `1,2,4`, none where none are given.

    Raises:
        UserError: a recipe's virtual workers cannot be shared so.
    """
    if text is None:
        return []
    workers = recipe.parallel.virtual_workers
    if workers is None:
        raise UserError(
            f"--processes {text!r}: bits differ with another number of processes, but for virtual workers.",
            remedy="Set training.parallel.virtual_workers, or leave --processes out.",
        )
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if any(number < 1 or workers % number for number in numbers):
        raise UserError(f"--processes {text!r} is not a list of numbers that divide the {workers} virtual workers.")
    return numbers


def share(run: Run, recipe: Recipe, processes: int) -> None:
    """Has so many processes train a run's next chunk."""
    document = recipe.model_dump(mode="json")
    document["training"]["parallel"]["processes"] = processes
    run.create(recipe_file.validate(document, origin=recipe.name))
