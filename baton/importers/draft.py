"""A recipe in the making from another trainer's file: read, filled, and written with a report of every key."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from baton.errors import UserError
from baton.recipe import load, yaml_text
from baton.recipe.base import written_name
from baton.recipe.recipe import Recipe
from baton.recipe.run import ASK, code_in
from baton.recipe.training import SECTIONS

Document = dict[str, Any]

EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values that ask for nothing."""


class NoCounterpartError(Exception):
    """A value that the other trainer takes and Baton has no counterpart for; the text is the remedy."""


Kind = Callable[[Any], Any]
"""Reads a value; None asks for nothing. Raises `ValueError` with the expected kind, or `NoCounterpartError`."""
Entry = Callable[["RecipeDraft", str], None]
Table = dict[str, Entry]


def boolean(value: object) -> bool:
    """Returns true or false, also from the words of Transformers' arguments."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]


class KeyResult(StrEnum):
    """Fate of a key that is not simply carried over."""

    unsupported = "not carried over"
    changed = "carried over, with a difference"
    elsewhere = "set elsewhere, without effect on training"
    not_needed = "not needed"


@dataclass(frozen=True)
class Remark:
    """Fate of one key, for the reader of the recipe; `text` is the reason and the remedy."""

    result: KeyResult
    key: str
    value: object
    text: str


class RecipeDraft:
    """A recipe in the making; relative paths in it start at the folder `target`.

    Each key of the file ends up in exactly one of `carried`, `idle` and, by its first remark, `remarks`.
    """

    def __init__(self, given: Mapping[str, object], *, tool: str, origin: str, target: str) -> None:
        self.given = dict(given)
        self.tool = tool
        self.origin = origin
        self.target = os.path.abspath(target)
        self.document: Document = {}
        self.carried: dict[str, str] = {}
        self.idle: list[str] = []
        self.remarks: list[Remark] = []
        self.assumed: list[str] = []

    def has(self, key: str) -> bool:
        """Tells whether a key is there with a value that asks for something."""
        return self.given.get(key) not in (*EMPTY, False)

    def get(self, key: str, default: object = None) -> Any:
        value = self.given.get(key)
        return default if value is None else value

    def read(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Returns a key's value; the default where the key is absent or has no counterpart."""
        value = self.get(key)
        if value is None:
            return default
        try:
            return kind(value)
        except NoCounterpartError as error:
            self.unsupported(key, str(error))
            return default
        except ValueError as error:
            raise self.wrong(key, str(error)) from None

    def is_on(self, key: str) -> bool:
        """Tells whether a key is there and true."""
        return self.has(key) and self.read(key, boolean, False)

    def fill(self, entries: Table) -> None:
        """Handles the keys of a table before all others, the absent ones for their defaults."""
        for key, entry in entries.items():
            entry(self, key)

    def apply(self, entries: Table) -> None:
        """Handles every key that is left: by name, by prefix, or as unknown."""
        families = sorted((key[:-1] for key in entries if key.endswith("*")), key=len, reverse=True)
        for key in self.given:
            if self.is_handled(key):
                continue
            family = next((family for family in families if key.startswith(family)), None)
            entry = entries.get(key) or (RecipeDraft.unknown if family is None else entries[f"{family}*"])
            if self.given[key] in EMPTY:
                self.ignore(key)
            else:
                entry(self, key)

    def unknown(self, key: str) -> None:
        self.unsupported(key, f"unknown: no setting of {self.tool} that this command knows; see docs/reference/recipe")

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys with a prefix that ask for something and are not handled yet."""
        return [key for key in self.given if key.startswith(prefix) and self.has(key) and not self.is_handled(key)]

    def is_handled(self, key: str) -> bool:
        return key in self.carried or key in self.idle or any(remark.key == key for remark in self.remarks)

    def put(self, path: str, value: object, *keys: str) -> None:
        """Sets a value of the recipe, and counts the keys it comes from as carried over."""
        load.set_path(self.document, path, value)
        self.carry(path, *keys)

    def carry(self, path: str, *keys: str) -> None:
        """Counts keys as carried over to `path`."""
        for key in keys:
            if self.given.get(key) not in EMPTY and not self.is_handled(key):
                self.carried[key] = path

    def peek(self, path: str, default: object = None) -> Any:
        """Returns a value that the recipe has so far."""
        node: Any = self.document
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def assume(self, path: str, value: object) -> None:
        """Sets the other trainer's default of an absent key, where Baton's differs."""
        if self.peek(path) is None:
            self.put(path, value)
            self.assumed.append(f"{path} {value}")

    def unsupported(self, key: str, text: str) -> None:
        self.note(KeyResult.unsupported, key, text)

    def changed(self, key: str, text: str) -> None:
        self.note(KeyResult.changed, key, text)

    def not_needed(self, key: str, text: str) -> None:
        self.note(KeyResult.not_needed, key, text)

    def drop(self, key: str, text: str, result: KeyResult = KeyResult.unsupported) -> None:
        """Notes that a key is not carried over, if it asks for something."""
        self.note(result, key, text) if self.has(key) else self.ignore(key)

    def ignore(self, *keys: str) -> None:
        """Notes that keys ask for nothing, unless they are handled."""
        self.idle += [key for key in keys if key in self.given and not self.is_handled(key)]

    def note(self, result: KeyResult, key: str, text: str) -> None:
        if not any(remark.key == key and remark.text == text for remark in self.remarks):
            self.carried.pop(key, None)
            self.remarks.append(Remark(result, key, self.given.get(key), text))

    def wrong(self, key: str, expected: str, remedy: str | None = None) -> UserError:
        """Returns the error for an impossible value."""
        return UserError(
            f"{self.origin}: {key} is {self.given.get(key)!r}, expected {expected}.",
            remedy=remedy or f"Correct it in the file, or give what {self.tool} accepts.",
        )

    @property
    def folders(self) -> tuple[str, str]:
        """Folders where the other trainer's relative paths may start: the current one, and the file's."""
        return os.getcwd(), os.path.dirname(os.path.abspath(self.origin))

    def relative(self, path: str, *folders: str) -> str:
        """Returns a local path from the recipe's folder, if it exists below one of these."""
        for folder in folders or self.folders:
            found = os.path.abspath(os.path.join(folder, os.path.expanduser(path)))
            if os.path.exists(found):
                near = os.path.relpath(found, self.target)
                return found if near.startswith(os.path.join("..", "..", "..")) else near
        return path


@dataclass(frozen=True, kw_only=True)
class OtherTrainer:
    """A trainer whose files can be imported.

    Attributes:
        tool: Its name.
        model: Key of the base model.
        nested: Keys whose sections are flattened.
        convert: Fills a recipe and handles each key of the file; later steps read values that earlier ones set.
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
                remedy=f"Use `baton init --from {tool.lower().replace('-', '')}` for this file.",
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
    head = [
        f"Made from {draft.tool}'s {os.path.basename(draft.origin)} by `baton init --from`; see docs/reference/recipe."
    ]
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
        yield f"written out, as the file omits it and {draft.tool} has a default:"
        yield from (f"  {line}" for line in draft.assumed)
    yield "assumed: one GPU; for more, multiply training.batch_size by their number"
