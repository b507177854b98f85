"""From a recipe file to a recipe that can run: overrides, absolute paths, and checks that need no GPU."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from typing import Any

from components.shared import models, recipe_file, sources
from components.shared.errors import UserError
from components.shared.recipe import Recipe
from components.shared.storage import Storage


def load(path: str, overrides: Sequence[str] = (), *, store: str | None = None, chunks: int | None = None) -> Recipe:
    """Reads a recipe with the command line's changes.

    Raises:
        UserError: see `recipe_file.load`.
    """
    extra = [f"store.uri={json.dumps(store)}"] if store else []
    extra += [f"chunks.count={chunks}"] if chunks is not None else []
    return recipe_file.load(path, [*overrides, *extra])


def localise(recipe: Recipe, recipe_path: str) -> Recipe:
    """Makes local paths absolute and checks that they exist, for a run on this machine.

    Raises:
        UserError: a source or base model is missing, or an architecture is unknown.
    """
    base_dir = os.path.dirname(os.path.abspath(recipe_path))
    document: dict[str, Any] = recipe.model_dump(mode="json")
    document["data"]["source"] = [sources.resolve(source, base_dir=base_dir) for source in recipe.data.source]
    if "://" not in recipe.store.uri:
        document["store"]["uri"] = os.path.abspath(os.path.expanduser(recipe.store.uri))
    if recipe.model.base and (found := _local_model(recipe.model.base, base_dir)):
        document["model"]["base"] = found
    prefix = "sqlite:///"
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith(prefix):
        document["tracking"]["mlflow"] = prefix + os.path.abspath(recipe.tracking.mlflow.removeprefix(prefix))
    if recipe.model.from_scratch:
        models.scratch_config(recipe.model.from_scratch, None, recipe.data.max_length)
    return recipe_file.validate(document, origin=recipe_path)


def check_store(recipe: Recipe) -> Storage:
    """Opens the store and writes to it.

    Raises:
        StoreError: it cannot be reached or written.
    """
    storage = Storage(recipe.store.uri)
    storage.check()
    return storage


def cluster_warnings(recipe: Recipe) -> list[str]:
    """Returns what will not work in pods, for a recipe that is compiled or submitted."""
    found = []
    if "://" not in recipe.store.uri:
        found.append(f"store {recipe.store.uri!r} is a folder, which pods do not share; use --store s3://bucket")
    if recipe.store.uri.startswith("s3://") and not recipe.resources.secret:
        found.append("resources.secret is not set: pods must get S3 credentials from their service account")
    for source in recipe.data.source:
        if "://" not in source and not source.startswith("builtin:"):
            found.append(f"data.source {source!r} is a local path, which pods do not see; use s3:// or hf://")
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith("sqlite:"):
        found.append("tracking.mlflow is a local database and is left out; give the address of an MLflow server")
    return found


def for_cluster(recipe: Recipe) -> Recipe:
    """Returns the recipe for pods: tracking in a local database is turned off."""
    document = recipe.model_dump(mode="json")
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith("sqlite:"):
        document["tracking"]["mlflow"] = None
    return recipe_file.validate(document, origin=recipe.name)


def new_run_name(recipe: Recipe) -> str:
    """Returns a name for a new run: the recipe's and the time."""
    return f"{recipe.name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"


def _local_model(base: str, base_dir: str) -> str | None:
    """Returns the absolute path of a base model that is a folder here, None for a hub id or URI."""
    if "://" in base:
        return None
    tried = [os.path.abspath(os.path.join(folder, os.path.expanduser(base))) for folder in (base_dir, os.getcwd())]
    for path in tried:
        if os.path.isdir(path):
            return path
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        raise UserError(f"model.base {base!r} is not a folder (looked for {' and '.join(dict.fromkeys(tried))}).")
    return None
