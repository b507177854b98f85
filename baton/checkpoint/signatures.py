"""Signatures of checkpoints: their statement, and the check that the right key signed it.

The signature is part of the manifest's own object, as `meta.signature`: with two objects, a crash between them would
make a checkpoint that cannot be restored. It is a sigstore bundle. model-signing compares `predicate.resources` with a
folder's files; Baton also compares `predicate.baton`, which has the digest of the whole manifest.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.documents import Document
from baton.runs.documents import AttachedRun, OwnCode, PinnedModels, SplitData, TokenizedRows
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.signing import SIGNATURE, STATEMENT_TYPE, Bundle, PublicKey, SignatureError, signer_of
from baton.store.manifest import Manifest, read_manifest

PREDICATE_TYPE = "https://model_signing/signature/v1.0"


class Sources(Document):
    """SHA-256 of each source of a signed checkpoint's state."""

    recipe: str = ""
    plan: str = ""
    data: str = ""  # of the document with the digest of the rows
    # Of the run's document and the manifest of the tokenized rows, which has the SHA-256 of their files.
    tokens: str = ""
    models: str = ""
    code: str = ""


def manifest_digest(manifest: Manifest) -> str:
    """Returns the SHA-256 of a manifest without its signature, by which the next checkpoint names its parent."""
    return _digest(vars(unsigned(manifest)))


def unsigned(manifest: Manifest) -> Manifest:
    """Returns a manifest without its signature."""
    return replace(manifest, meta={name: value for name, value in manifest.meta.items() if name != SIGNATURE})


def sources_of(run: Run) -> Sources:
    """Returns the digests of a run's sources in the store; `DamagedError` or `UserError` if a document is unusable."""
    # A script's run has facts in place of a recipe.
    head = run.raw("recipe.json") or run.raw(AttachedRun.NAME) or run.require("recipe.json")
    tokens = run.read(TokenizedRows)
    manifest = read_manifest(run.storage, tokens.prefix) if tokens and tokens.prefix else None
    return Sources(
        recipe=_digest(head.get("recipe", head.get("facts"))),
        plan=_digest(run.raw(Plan.NAME)),
        data=_digest(run.raw(SplitData.NAME)),
        tokens=_digest([run.raw(TokenizedRows.NAME), manifest_digest(manifest)] if manifest else None),
        models=_digest(run.raw(PinnedModels.NAME)),
        code=_digest(run.raw(OwnCode.NAME)),
    )


def changed_sources(run: Run, signed: Sources | None) -> list[str]:
    """Returns the names of a run's sources that differ from those that a checkpoint was signed with."""
    if signed is None:
        return []
    before, now = signed.to_json(), sources_of(run).to_json()
    # Without the recipe: the identity covers the settings that decide bits, and the others may change.
    return [name for name in now if name != "recipe" and before.get(name) != now[name]]


def require_same_sources(run: Run, signed: Sources | None, step: int) -> None:
    """Raises `SignatureError` if a run's sources differ from those that a checkpoint was signed with."""
    if changed := changed_sources(run, signed):
        raise SignatureError(
            f"the checkpoint of step {step} was signed with other {' and '.join(changed)} than the run has now.",
            remedy="Find out who changed them, and put them back; where you did, fork the run under another name.",
        )


def sign(manifest: Manifest, public: PublicKey) -> Bundle:
    """Signs a manifest that has no signature yet; `UserError` if this process has not the run's key."""
    return signer_of(public, "the run's checkpoints").sign(statement(manifest))


def require_signer(public: PublicKey) -> None:
    """Raises `UserError` if this process cannot sign for a key, before it trains."""
    sign(Manifest(kind="", folder="", files={}), public)


def require_signed(manifest: Manifest, public: PublicKey, where: str) -> None:
    """Raises `SignatureError` if a manifest differs from what a key has signed."""
    if problem := signature_problem(manifest, public):
        raise SignatureError(
            f"{where} is refused: {problem}",
            remedy="Its writer can write to the store without the key: find out who. To resume from the previous one, "
            "remove its manifests by hand. If it is from before the run was signed, fork it under another "
            "name, or remove chunks.signing.",
        )


def signature_problem(manifest: Manifest, public: PublicKey) -> str | None:
    """Returns why a manifest is not as a key has signed it, or None."""
    bundle = manifest.meta.get(SIGNATURE)
    if bundle is None:
        return "it is not signed."
    try:
        is_same = public.open(bundle) == statement(unsigned(manifest))
    except SignatureError as error:
        return error.message
    except (ValueError, TypeError):  # a file's digest is not hexadecimal
        is_same = False
    return None if is_same else "it differs from the signed state."


def statement(manifest: Manifest) -> dict[str, Any]:
    """Returns the in-toto statement that is signed for a manifest, as model-signing reads it."""
    resources = [
        {"name": name, "algorithm": "sha256", "digest": entry["sha256"]}
        for name, entry in sorted(manifest.files.items())
    ]
    together = hashlib.sha256(b"".join(bytes.fromhex(each["digest"]) for each in resources)).hexdigest()
    meta = manifest.meta
    told = {name: meta.get(name) for name in ("run", "step", "chunk", "identity", "sources", "parent", "digest")}
    if seal := meta.get("seal"):  # absent in the statements of older checkpoints
        told["seal"] = seal
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": f"{meta.get('run')}@{meta.get('step')}", "digest": {"sha256": together}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": []},
            "resources": resources,
            "baton": {"manifest": manifest_digest(manifest), **told},
        },
    }


def _digest(document: Mapping[str, Any] | object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest() if document is not None else ""
