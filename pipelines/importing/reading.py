"""The other trainer's file: YAML with keys and values, made flat."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe.mistakes import yaml_text
from baton.pipelines.importing.draft import Document, Draft
from baton.pipelines.importing.trainer import Trainer

MODELS = {"base_model": "axolotl", "model_name_or_path": "LLaMA-Factory"}
"""Trainer by its key for the base model."""

SECRET = re.compile(r"token$|secret|password|api_key|webhook", re.IGNORECASE)
"""Keys whose values are not repeated."""


def draft_of(trainer: Trainer, file: str, target: str) -> Draft:
    """Returns what becomes of a trainer's file; `target` is the folder in which the recipe will be.

    Raises:
        UserError: the file cannot be read, or asks for what cannot be meant.
    """
    draft = Draft(flatten(load(file, trainer.tool), trainer.nested), tool=trainer.tool, origin=file, target=target)
    if not draft.has(trainer.model):
        raise _without_model(draft, trainer.model)
    trainer.convert(draft)
    return draft


def _without_model(draft: Draft, key: str) -> UserError:
    """Returns the error for a file that names no model by its trainer's key, perhaps by the other one's."""
    for other, tool in MODELS.items():
        if other != key and draft.has(other):
            return UserError(
                f"{draft.origin}: {other} is a key of {tool}.",
                remedy=f"Use `baton import {tool.lower().replace('-', '')}` for this file.",
            )
    article = "an" if draft.tool[0] in "aeiou" else "a"
    remedy = f"Give {article} {draft.tool} training file; it names the base model there."
    return UserError(f"{draft.origin}: {key} is missing.", remedy=remedy)


def load(path: str, tool: str) -> Document:
    """Reads a file of another trainer.

    Raises:
        UserError: it is missing, not YAML, or does not hold keys and values.
    """
    file = Path(path)
    if not os.path.isfile(path):
        raise UserError(f"{path!r} is not a file.", remedy=f"Give the path of a training file of {tool}.")
    try:
        document = yaml_text.load(yaml_text.decode(file.read_bytes()), yaml_text.LenientLoader)
    except OSError as error:
        raise UserError(f"{path!r} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict) or not document:
        held = "nothing" if document is None else f"a {type(document).__name__}"
        raise UserError(f"{path!r} holds {held}, expected keys and values, as {tool} reads them.")
    return {str(key): value for key, value in document.items()}


def flatten(document: Document, nested: tuple[str, ...]) -> Document:
    """Returns a document with the sections named `nested` taken apart: `trl.beta`, `datasets[0].type.field_prompt`."""
    flat: Document = {}
    for key, value in document.items():
        flat.update(_apart(key, value) if key in nested else {key: value})
    return flat


def _apart(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _apart(f"{key}.{name}", inner)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for at, item in enumerate(value):
            yield from _apart(f"{key}[{at}]", item)
    else:
        yield key, value


def name_for(path: str) -> str:
    """Returns a recipe's name for a file's."""
    stem = os.path.basename(path).partition(".")[0].lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:63].strip("-") or "imported"


def shown(key: str, value: object) -> str:
    """Returns a value for one line of a report: short, and no secret."""
    if SECRET.search(key) and value:
        return "(not shown)"
    line = " ".join((value if isinstance(value, str) else repr(value)).split())
    return line if len(line) <= 60 else f"{line[:57]}…"
