"""Consent to the code of somebody else's recipe, given when it is compiled, submitted or run."""

from collections.abc import Iterator, Sequence

from baton.errors import UserError
from baton.models import loading, pinned, user_code
from baton.recipe.recipe import Recipe
from baton.recipe.run import ASK, code_in
from baton.recipe.search import ACCEPTED, PREVIOUS
from baton.scratch import scratch_folder
from baton.source import paths
from baton.source.origin import RecipeSource

SHOWN = 6
"""Settings that a message names."""


def require_consent(recipe: Recipe, source: RecipeSource) -> Recipe:
    """Refuses a foreign recipe's code without consent, before any of it runs.

    With consent, the returned recipe has the digests of all code files; its stages run no other code.
    """
    if not source.is_foreign and recipe.trust != ASK:
        return recipe
    found = code_in(recipe.model_dump(mode="json", exclude_defaults=True))
    resources = source.document().get("resources")
    named = resources.get("image") if isinstance(resources, dict) else None
    if named and named == recipe.resources.image:  # the recipe itself names it, not a command's option
        found.append(f"resources.image: {named}")
    refuse_untrusted(source, found)
    return recipe.model_copy(update={"trust": sorted(set(_files(recipe, source))) if found else None})


def refuse_untrusted(source: RecipeSource, found: Sequence[str]) -> None:
    """Refuses a foreign recipe's settings that run code (`code_in`), unless somebody consented."""
    if found and not source.is_trusted:
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise UserError(
            f"{source.name!r} comes from elsewhere and would run code: {'; '.join([*found[:SHOWN], *more])}.",
            remedy="Read what is named there, then give --trust (in Python, load with trust=True): it holds for that "
            "code as it is now.",
        )


def _files(recipe: Recipe, source: RecipeSource) -> Iterator[str]:
    """Yields the digest of each file of code that a recipe names."""
    for part in recipe.phase_recipes() or [recipe]:
        if part.hooks.source:
            yield from user_code.files_of(paths.code(part.hooks.source, source.folder))
        own = part.evaluation.tasks
        if own and own.include_path:
            path = _local(own.include_path, source, user_code.TASKS_SETTING)
            with scratch_folder("trust") as scratch:
                fetched = user_code.fetch_tasks(path, scratch)
                yield from (digest for _, digest in user_code.files(fetched, user_code.TASK_ENDINGS))
        for setting, base, revision in _models(part):
            folder = loading.local_model(_local(base, source, setting), revision, weights=False)
            yield from user_code.model_files(setting, folder)


def _models(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """Yields setting, address and revision of each model whose own code would run."""
    for origin in pinned.origins(recipe).values():
        if origin.runs_code and origin.base != PREVIOUS:
            yield origin.setting, origin.base, origin.revision
    if not recipe.model.trust_remote_code:
        return
    if recipe.model.tokenizer and recipe.model.tokenizer.base:
        yield "model.tokenizer.base", recipe.model.tokenizer.base, None
    production = recipe.evaluation.production
    if production and production != ACCEPTED and not production.startswith("models:"):
        yield "evaluation.production", production, None


def _local(path: str, source: RecipeSource, setting: str) -> str:
    return paths.model(path, source.folder, setting) or path
