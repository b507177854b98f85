"""Credentials in recipes: refused in addresses, required to sign checkpoints."""

import re
from collections.abc import Iterator

from baton.checkpoint.signatures import require_signer
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.run import Signing, leaves
from baton.signing import SIGNED_BY, PublicKey
from baton.store.clouds import cloud_of, environment_of

_IN_ADDRESS = re.compile(r"^(?P<scheme>[a-zA-Z][\w+.-]*://)[^/:@\s]+:(?!\d+(?:/|$))[^@\s]+@(?P<rest>.*)$", re.DOTALL)
"""An address with user and password, or key and secret, before the host or bucket."""
_SIGNED = re.compile(r"[?&](sig|X-Amz-(Signature|Credential)|AWSAccessKeyId|X-Goog-Signature)=")


def require_none(recipe: Recipe) -> None:
    """Refuses credentials in addresses: a recipe's text gets into runs, logs and pipelines."""
    for path, value in leaves(recipe.model_dump(mode="json", exclude_defaults=True)):
        if not isinstance(value, str):
            continue
        if match := _IN_ADDRESS.match(value):
            address = match["scheme"] + match["rest"]
        elif "://" in value and _SIGNED.search(value):
            address = value.partition("?")[0]
        else:
            continue
        cloud = cloud_of(address)
        given = cloud.keys if cloud else "the environment"
        pods = "resources.secret"
        if path == "tracking.mlflow":
            is_server = address.startswith(("http://", "https://"))
            server = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            given = server if is_server else "its driver's own means, such as PGPASSWORD"
            pods = "resources.secret_env"
        raise UserError(
            f"{path}: the address holds a credential, which a recipe carries into runs, logs and pipelines.",
            remedy=f"Write {address!r} and give the credential by {given}; pods get it by {pods}.",
        )


def not_named(recipe: Recipe) -> Iterator[str]:
    """Yields a note where a recipe names no secret with its store's credentials."""
    variables = environment_of(recipe.store.uri)
    named = [name for _, keys in recipe.resources.secrets for name in keys.values()]
    if variables and not any(name.startswith(variables) for name in named):
        yield (
            f"neither resources.secret nor resources.secret_env names the store's credentials ({variables[0]}…): "
            "pods must get them from their service account"
        )


def signing_settings(recipe: Recipe) -> list[Signing]:
    """Returns the `chunks.signing` of a recipe or of its phases."""
    return [part.chunks.signing for part in recipe.phase_recipes() or [recipe] if part.chunks.signing]


def signing_environment(recipe: Recipe) -> dict[str, str]:
    """Returns the variable that fixes the expected signer for this machine's stages, whatever the store holds."""
    keys = {signing.public_key for signing in signing_settings(recipe)}
    return {SIGNED_BY: keys.pop()} if len(keys) == 1 else {}


def require_signing_key(recipe: Recipe) -> Recipe:
    """Checks that this machine can sign, and returns the recipe without the cluster's Secret."""
    found = signing_settings(recipe)
    for signing in found:
        require_signer(PublicKey(signing.public_key))
    if not found:
        return recipe
    document = recipe.model_dump(mode="json")
    for section in (document["chunks"], *(phase["chunks"] for phase in document["phases"])):
        if section.get("signing"):
            section["signing"]["secret"] = None
    return load.validate(document, origin=recipe.name)


def require_signing_secret(recipe: Recipe) -> None:
    """Checks that pods will have the key."""
    if any(signing.secret is None for signing in signing_settings(recipe)):
        raise UserError(
            "chunks.signing names no Secret, and pods have no other way to the private key.",
            remedy="Make one: `kubectl create secret generic baton-signing --from-file=key.pem=FILE`, and set "
            "chunks.signing.secret: baton-signing/key.pem.",
        )
