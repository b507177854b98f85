"""From a trainer's file to a recipe: read, flattened, imported, and written with a report of its keys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel

from baton.errors import UserError
from baton.importers.draft import Document, KeyResult, RecipeDraft
from baton.recipe import load, yaml_text
from baton.recipe.base import written_name
from baton.recipe.recipe import Recipe
from baton.recipe.run import ASK, code_in
from baton.recipe.training import SECTIONS


@dataclass(frozen=True, kw_only=True)
class OtherTrainer:
    """A trainer whose files can be imported.

    Attributes:
        tool: Its name.
        model: Key of the base model.
        nested: Keys whose sections are flattened.
        convert: Fills a recipe and handles each key of the file; later steps look at values that earlier ones set.
    """

    tool: str
    model: str
    nested: tuple[str, ...] = ()
    convert: Callable[[RecipeDraft], None]


MODELS = {"base_model": "axolotl", "model_name_or_path": "LLaMA-Factory"}
"""Key of the base model → trainer."""

SECRET = re.compile(r"token$|secret|password|api_key|webhook", re.IGNORECASE)
"""Keys whose values are not repeated."""


def draft_of(trainer: OtherTrainer, file: str, target: str) -> RecipeDraft:
    """Returns the draft made from a trainer's file; the recipe will be in the folder `target`."""
    draft = RecipeDraft(
        flatten(load_file(file, trainer.tool), trainer.nested), tool=trainer.tool, origin=file, target=target
    )
    if not draft.has(trainer.model):
        raise _without_model(draft, trainer.model)
    trainer.convert(draft)
    return draft


def _without_model(draft: RecipeDraft, key: str) -> UserError:
    """Returns the error for a file without its trainer's key of the model, perhaps with another trainer's."""
    for other, tool in MODELS.items():
        if other != key and draft.has(other):
            return UserError(
                f"{draft.origin}: {other} is a key of {tool}.",
                remedy=f"Use `baton import {tool.lower().replace('-', '')}` for this file.",
            )
    article = "an" if draft.tool[0] in "aeiou" else "a"
    remedy = f"Give {article} {draft.tool} training file; it names the base model there."
    return UserError(f"{draft.origin}: {key} is missing.", remedy=remedy)


def load_file(path: str, tool: str) -> Document:
    """Reads a file of another trainer."""
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
    """Returns a document with sections flattened: `trl.beta`, `datasets[0].type.field_prompt`."""
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
    """Returns a recipe's name, made from a file's."""
    stem = os.path.basename(path).partition(".")[0].lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:63].strip("-") or "imported"


def shown(key: str, value: object) -> str:
    """Returns a value for one line of a report: short, and no secret."""
    if SECRET.search(key) and value:
        return "(not shown)"
    line = " ".join((value if isinstance(value, str) else repr(value)).split())
    return line if len(line) <= 60 else f"{line[:57]}…"


def recipe_of(draft: RecipeDraft) -> Recipe:
    """Returns the recipe, checked."""
    document = {"name": name_for(draft.origin), **draft.document}
    if code_in(document):
        document["trust"] = ASK
    return load.validate(document, origin=f"made from {draft.origin}")


def to_yaml(recipe: Recipe, draft: RecipeDraft) -> str:
    """Returns a recipe's YAML: values that differ from the defaults, below their origin."""
    left = dict.fromkeys(remark.key for remark in draft.remarks if remark.result is KeyResult.unsupported)
    head = [f"Made from {draft.tool}'s {os.path.basename(draft.origin)} by `baton import`; see docs/recipe.md."]
    if left:
        head.append(f"Not carried over: {', '.join(left)}.")
    lines = [f"# {' '.join(line.split())}\n" for line in head]
    body = yaml.dump(_differing(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=200)
    return "".join([*lines, body])


class _Dumper(yaml_text.Dumper):
    """Short mappings and lists on one line, as people write recipes."""

    def represent_data(self, data: object) -> yaml.Node:
        node: yaml.Node = super().represent_data(data)
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            inner = [value for _, value in pairs] or node.value
            few = len(pairs) <= 4 and sum(len(value.value) for _, value in pairs) <= 60
            node.flow_style = few and all(isinstance(value, yaml.ScalarNode) for value in inner)
        return node


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Writes a text of several lines as it is, and one of line breaks alone in quotes."""
    lines = "|" if "\n" in text.strip() else '"'
    return dumper.represent_text(text, style=lines if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _differing(section: BaseModel) -> Document:
    """Returns the values of a section that differ from its defaults; its first field where none does."""
    written: Document = {}
    for name, known in type(section).model_fields.items():
        value = getattr(section, name)
        if not known.is_required() and value == known.get_default():
            continue
        if isinstance(value, BaseModel):
            inner = _differing(value)
            if not inner and name in SECTIONS:
                continue  # follows from the method
            first = next(iter(type(value).model_fields))
            value = inner or {first: _plain(getattr(value, first))}
        written[written_name(name, known)] = _plain(value)
    if source := written.get("source"):
        written["source"] = source[0] if len(source) == 1 and type(section).__name__ == "Data" else source
    return written


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return _differing(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def import_report(draft: RecipeDraft, target: str) -> Iterator[str]:
    """Yields the lines that report the fate of every key; `target` is the recipe's name there."""
    keys = {fate: {remark.key for remark in draft.remarks if remark.result is fate} for fate in KeyResult}
    asking = len(draft.given) - len(draft.idle)
    changed = keys[KeyResult.changed] - keys[KeyResult.unsupported]
    yield (
        f"{target}: from {draft.tool}'s {draft.origin}, {len(draft.carried) + len(changed & draft.given.keys())} of "
        f"{asking} settings carried over"
    )
    for fate in KeyResult:
        remarks = [remark for remark in draft.remarks if remark.result is fate]
        if remarks:
            yield f"{fate}:"
        for remark in remarks:
            value = f" {shown(remark.key, remark.value)}" if remark.key in draft.given else ""
            yield f"  {remark.key}:{value} – {remark.text}"
    if code := code_in(draft.document):
        yield f"code waits until you have read it: remove trust: {ASK} then, or give --trust"
        yield from (f"  {line}" for line in code)
    if draft.idle:
        yield f"off or without a value: {', '.join(draft.idle)}"
    if draft.assumed:
        yield f"written out, as the file leaves it to {draft.tool}:"
        yield from (f"  {line}" for line in draft.assumed)
    yield "assumed: one GPU; for more, multiply training.batch_size by their number"
