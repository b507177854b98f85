"""What a recipe whose checkpoints are signed needs around its processes, looked at before any of them starts."""

from __future__ import annotations

from baton.components.shared.checkpoints.signatures import require_signer
from baton.components.shared.core.errors import UserError
from baton.components.shared.core.signing import SIGNED_BY, PublicKey
from baton.components.shared.recipe import Recipe, Signing, recipe_file


def settings(recipe: Recipe) -> list[Signing]:
    """Returns what a recipe, or each of its phases, says of signatures."""
    return [part.chunks.signing for part in recipe.phase_recipes() or [recipe] if part.chunks.signing]


def environment(recipe: Recipe) -> dict[str, str]:
    """Returns what tells this machine's stages whose signature to ask for, whatever the store says later."""
    keys = {signing.public_key for signing in settings(recipe)}
    return {SIGNED_BY: keys.pop()} if len(keys) == 1 else {}


def here(recipe: Recipe) -> Recipe:
    """Checks that this machine can sign, and returns the recipe without the Secret that a cluster mounts.

    Raises:
        UserError: it has not the key.
    """
    found = settings(recipe)
    for signing in found:
        require_signer(PublicKey(signing.public_key))
    if not found:
        return recipe
    document = recipe.model_dump(mode="json")
    for section in (document["chunks"], *(phase["chunks"] for phase in document["phases"])):
        if section.get("signing"):
            section["signing"]["secret"] = None
    return recipe_file.validate(document, origin=recipe.name)


def require_secret(recipe: Recipe) -> None:
    """Checks that pods will have the key.

    Raises:
        UserError: no Secret is named.
    """
    if any(signing.secret is None for signing in settings(recipe)):
        raise UserError(
            "chunks.signing names no Secret, and pods have no other way to the private key.",
            remedy="Make one: `kubectl create secret generic baton-signing --from-file=key.pem=FILE`, and set "
            "chunks.signing.secret: baton-signing/key.pem.",
        )
