"""Local paths in a recipe: models, rows and code."""

import os
import re
from typing import Any

from baton.errors import UserError, suggest_path
from baton.recipe.recipe import Recipe
from baton.store import sources


def model(base: str, base_dir: str, setting: str = "model.base", *, revision: str | None = None) -> str | None:
    """Returns the absolute path of a local model or other folder, None for a hub id or URI.

    Relative paths start at the recipe's folder `base_dir`, then at the current one; only a hub id has a `revision`.
    """
    if "://" in base:
        return None
    tried = [os.path.abspath(os.path.join(folder, os.path.expanduser(base))) for folder in (base_dir, os.getcwd())]
    for path in tried:
        if os.path.isdir(path):
            return path
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        near = suggest_path(base, (base_dir, os.getcwd()))
        raise UserError(
            f"{setting} {base!r} is not a folder (looked for {' and '.join(dict.fromkeys(tried))}).",
            remedy=f"Did you mean {near!r}?" if near else None,
        )
    if not setting.startswith("evaluation."):  # where no revision could say that a hub id is meant
        _refuse_near(base, (base_dir, os.getcwd()), setting, revision)
    return None


def data_sources(recipe: Recipe, base_dir: str) -> list[str | dict[str, Any]]:
    """Returns a recipe's sources with local paths made absolute."""
    resolved: list[str | dict[str, Any]] = []
    for entry, source in zip(recipe.data.source, recipe.data.sources, strict=True):
        uri = sources.resolve(source.uri, base_dir=base_dir)
        resolved.append(uri if isinstance(entry, str) else {**entry.model_dump(mode="json"), "uri": uri})
    return resolved


def _refuse_near(base: str, folders: tuple[str, str], setting: str, revision: str | None) -> None:
    """Refuses a hub id that differs by a few letters from the path of a model's folder here."""
    near = None if revision or "/" not in base else suggest_path(base, folders, cutoff=0.8)
    is_model = near and any(os.path.isfile(os.path.join(folder, near, "config.json")) for folder in folders)
    # Qwen3-1.7B is another model than the Qwen3-0.6B beside it, and so is Qwen3-0.6B-Base.
    if near and is_model and abs(len(near) - len(base)) < 3 and _letters(near) != _letters(base):
        raise UserError(
            f"{setting} {base!r} is not a folder, and would be fetched from the hub.",
            remedy=f"Did you mean {near!r}? If the hub's {base} is meant, say so by its revision, such as main.",
        )


def _letters(path: str) -> str:
    return re.sub(r"[\W\d]", "", path)


def code(source: str, base_dir: str) -> str:
    """Returns the absolute path of the user's Python files, beside the recipe first, or their address."""
    if "://" in source:
        return source
    for folder in (base_dir, os.getcwd()):
        path = os.path.abspath(os.path.join(folder, os.path.expanduser(source)))
        if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".py")):
            return path
    near = suggest_path(source, (base_dir, os.getcwd()))
    raise UserError(
        f"hooks.source {source!r} is no Python file or folder.",
        remedy=f"Did you mean {near!r}?" if near else "Check the path.",
    )
