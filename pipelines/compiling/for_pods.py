"""Recipes that run in pods: what will not work there, and what is left out."""

from __future__ import annotations

from baton.components.shared.core import wire
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, Resources, recipe_file
from baton.pipelines.compiling import credentials, signed


def warnings(recipe: Recipe) -> list[str]:
    """Returns what will not work in pods, for a recipe that is compiled or submitted."""
    lines = []
    if "://" not in recipe.store.uri:
        lines.append(f"store {recipe.store.uri!r} is a folder, which pods do not share; use s3://, gs:// or az://")
    if recipe.resources.image == Resources.model_fields["image"].default:
        lines.append(f"image {recipe.resources.image!r} is a placeholder; push one with make images and give --image")
    lines += credentials.not_named(recipe)
    for source in [source.uri for part in recipe.phase_recipes() or [recipe] for source in part.data.sources]:
        if "://" not in source and not source.startswith("builtin:"):
            lines.append(
                f"data.source {source!r} is a local path, which pods do not see; use s3://, gs://, az:// or hf://"
            )
    if recipe.hooks.source and "://" not in recipe.hooks.source:
        lines.append(
            f"hooks.source {recipe.hooks.source!r} is a local path, which pods do not see; put it into a bucket"
        )
    if recipe.resources.profile == "mps":
        lines.append("resources.profile mps is for Apple's GPU, which no pod has; name cpu, cuda-small or cuda-large")
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith("sqlite:"):
        lines.append("tracking.mlflow is a local database and is left out; give the address of an MLflow server")
    return lines


def settled(recipe: Recipe) -> Recipe:
    """Returns the recipe for pods: tracking in a local database is turned off.

    Raises:
        UserError: its checkpoints are signed, and no Secret has the key, or its store has an address that changes on
            its way to a pod.
    """
    signed.require_secret(recipe)
    if wire.sent(recipe.store.uri) != recipe.store.uri:
        raise UserError(
            f"store {recipe.store.uri!r} goes from stage to stage as it is, and Argo and Kubernetes replace "
            "{{…}} and $(…) in it.",
            remedy="Name a bucket or folder without braces, $( and what does not print.",
        )
    document = recipe.model_dump(mode="json")
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith("sqlite:"):
        document["tracking"]["mlflow"] = None
    return recipe_file.validate(document, origin=recipe.name)
