"""Digests of a recipe's sources: read only where size or time differ from last time."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

from baton.documents import load_object
from baton.errors import DamagedError, UserError
from baton.models import user_code
from baton.recipe.data import Source
from baton.recipe.recipe import Recipe
from baton.runs.run import identity
from baton.runtime import SYSTEM
from baton.store import sources
from baton.store.sources import SourceFile
from baton.store.storage import Storage

Seen = dict[str, list[str]]
"""Address of a file → what it looked like, and the SHA-256 of its content."""

TAGS = ("ETag", "etag", "e_tag", "blob_id")
"""Names under which file systems tell a mark of an object's content."""


def data_digest(recipe: Recipe, storage: Storage) -> str:
    """Returns a digest of the content of all sources, and of what the recipe says of each.

    Where files lie and what they are called does not count. A file's ETag, or size, time and number on the disk, say
    whether it is the one whose content was hashed before: then nothing of it is read. What was seen is kept in the
    store below the recipe's name.

    Raises:
        UserError: a source matches nothing, or cannot be reached.
    """
    path = f"models/{recipe.name}/seen.json"
    before = _read(storage, path)
    now: Seen = {}
    contents = []
    for part in recipe.phase_recipes() or [recipe]:
        for source in part.data.sources:
            settings = source.model_dump(mode="json", exclude={"uri"})
            contents.append([settings, *sorted(_contents(source, before, now))])
    if now != before:
        storage.write(path, json.dumps(now).encode())
    return _sha256(contents)


def recipe_digest(recipe: Recipe) -> str:
    """Returns a digest of what the recipe makes of the data: all that decides the bits of the model.

    The number of chunks is not among it, nor what comes after training, nor how retraining itself is set.
    """
    documents = []
    for part in recipe.phase_recipes() or [recipe]:
        document = identity(part)
        del document["chunks"], document["retrain"]
        documents.append([document, user_code.digest(part.hooks.source) if part.hooks.source else None])
    return _sha256(documents)


def digest_of(*parts: Any) -> str:
    """Returns a digest of plain values."""
    return _sha256(list(parts))


def _contents(source: Source, before: Seen, now: Seen) -> list[str]:
    """Returns a digest for each file of a source, and notes them in `now`."""
    if source.uri == sources.BUILTIN:
        return [f"Python {platform.python_version()}"]
    if sources.is_dataset_id(source.uri):
        return [f"{source.uri.partition('?')[2]} {_revision(source.uri)}"]

    def look(uri: str) -> list[str]:
        signature = _signature(files[uri])
        known = before.get(uri)
        if known and known[0] == signature:
            return known
        return [signature, files[uri].storage.sha256(files[uri].path)[1]]

    files = {file.uri: file for file in sources.files([source.uri])}
    digests = dict(zip(sorted(files), SYSTEM.each(look, sorted(files)), strict=True))
    now |= digests
    return [digest for _, digest in digests.values()]


def _signature(file: SourceFile) -> str:
    """Returns what tells a file from another at the same place without reading it."""
    info = file.info()
    tag = next((info[name] for name in TAGS if info.get(name)), None)
    told = [tag] if tag else [info.get(name) for name in ("mtime", "created", "ino")]
    return json.dumps([str(part) for part in (info.get("size"), *told)])


def _revision(source: str) -> str:
    """Returns the commit that a hub dataset is at."""
    from huggingface_hub import HfApi

    name, _, revision = source.removeprefix("hf://datasets/").partition("?")[0].rstrip("/").partition("@")
    try:
        return str(HfApi().dataset_info(name, revision=revision or None).sha)
    except Exception as error:
        raise UserError(
            f"data.source {source!r} cannot be looked up on the hub: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}",
            remedy="Check the name, HF_TOKEN for a private one, and that the hub can be reached.",
        ) from None


def _read(storage: Storage, path: str) -> Seen:
    """Returns what was seen before; of what cannot be read nothing was, and all files are hashed again."""
    try:
        seen = load_object(storage.read(path), storage.uri(path))
    except (FileNotFoundError, DamagedError):
        return {}
    return {uri: known for uri, known in seen.items() if isinstance(known, list) and len(known) == 2}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
