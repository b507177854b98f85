"""Reading a recipe: YAML, overrides by dotted path, and messages that name the key and the remedy."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from baton.errors import UserError
from baton.recipe import explain, yaml_text
from baton.recipe.recipe import Recipe, check_effects

MOST_PROBLEMS = 50
"""Problems that a message tells of: each is compared with all keys there are, which takes a while."""


MISSING: Any = object()


class _Read(dict[str, Any]):
    """A recipe's values, with the text that they were read from and changes to it."""

    text = ""
    overrides: tuple[str, ...] = ()


def load(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and checks it; `overrides` are `dotted.path=value`, the value in YAML, applied in order."""
    return validate(read(path, overrides), origin=path)


def read(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a recipe file as plain values, not checked yet; see `load`."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"recipe {path!r} is not a file.", remedy="Give the path of a YAML recipe.")
    return parse(decode(file.read_bytes(), origin=path), overrides, origin=path)


def decode(data: bytes, *, origin: str) -> str:
    """Returns the text of a recipe, from an encoding that YAML is written in."""
    try:
        return yaml_text.decode(data)
    except yaml.YAMLError as error:
        raise UserError(f"recipe {origin!r} is not YAML: {error}.") from None


def parse(source: str | Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str) -> dict[str, Any]:
    """Reads a recipe as plain values, not checked yet.

    Args:
        source: YAML, or plain values, which are not changed.
        overrides: `dotted.path=value` strings.
        origin: The recipe's name in messages.
    """
    try:
        document = yaml_text.load(source) if isinstance(source, str) else copy.deepcopy(dict(source))
    except yaml.YAMLError as error:
        raise UserError(f"recipe {origin!r} is not YAML: {yaml_text.explain(str(source), error)}") from None
    if document is None:
        raise UserError(f"recipe {origin!r} is empty, expected keys and values.")
    if not isinstance(document, dict):
        raise UserError(f"recipe {origin!r} holds a {type(document).__name__}, expected keys and values.")
    if isinstance(document.get("store"), str):
        document["store"] = {"uri": document["store"]}
    for override in overrides:
        _override(document, override)
    read = _Read(document)
    read.text, read.overrides = source if isinstance(source, str) else "", tuple(overrides)
    return read


def validate(document: dict[str, Any], *, origin: str) -> Recipe:
    """Checks a recipe given as plain values; one message has a line per problem, each naming the dotted path."""
    document = with_field_names(document, origin=origin)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        lines = [
            explain.explain(problem, document, functools.partial(_written, document, explain.place_of(problem)))
            for problem in map(dict, error.errors()[:MOST_PROBLEMS])
        ]
        if error.error_count() > MOST_PROBLEMS:
            lines.append(f"and {error.error_count() - MOST_PROBLEMS:,} more")
        raise UserError("\n  ".join([f"recipe {origin!r} has {error.error_count()} problem(s):", *lines])) from None


def _written(document: Mapping[str, Any], location: tuple[str | int, ...]) -> str | None:
    """Returns how a scalar of a recipe is written, None where that is not known."""
    if not isinstance(document, _Read):
        return None
    path = ".".join(map(str, location))
    names = (path, explain.as_written(path))
    for changed, _, text in (change.partition("=") for change in reversed(document.overrides)):
        if changed.strip() in names:
            return text.strip()
    found = yaml_text.written(document.text, location)
    return found if found is not None else yaml_text.written(document.text, tuple(names[1].split(".")))


def with_field_names(document: dict[str, Any], *, origin: str) -> dict[str, Any]:
    """Returns a recipe's plain values with its fields' names, where people write others; see `WrittenAs`."""
    changed = copy.deepcopy(document)
    for part in _trainings(changed):
        for theirs, ours in explain.renamed().items():
            if (value := _taken(part, theirs)) is not MISSING:
                if _taken(part, ours) is not MISSING:
                    raise UserError(f"recipe {origin!r}: {theirs} and {ours} are the same setting; leave {ours} out.")
                set_path(part, ours, value)
    sweep = changed.get("sweep")
    if isinstance(sweep, dict) and isinstance(sweep.get("parameters"), dict):
        sweep["parameters"] = {explain.renamed().get(path, path): given for path, given in sweep["parameters"].items()}
    return changed


def with_written_names(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain values of a recipe with the names that people write; see `with_field_names`."""
    changed = copy.deepcopy(document)
    for part in _trainings(changed):
        for theirs, ours in explain.renamed().items():
            if (value := _taken(part, ours)) is not MISSING:
                set_path(part, theirs, value)
    return changed


def former_names(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the settings that a recipe has under names of before, each with that of today."""
    parts = _trainings(copy.deepcopy(document))
    names = explain.renamed().items()
    return [(ours, theirs) for theirs, ours in names if any(_taken(part, ours) is not MISSING for part in parts)]


def _trainings(document: dict[str, Any]) -> list[dict[str, Any]]:
    phases = document.get("phases")
    return [document, *(part for part in (phases if isinstance(phases, list) else []) if isinstance(part, dict))]


def _taken(document: dict[str, Any], path: str) -> Any:
    """Takes out what is at a dotted path of plain values; `MISSING` where nothing is."""
    *sections, last = path.split(".")
    node: Any = document
    for key in sections:
        node = node.get(key) if isinstance(node, dict) else None
    return node.pop(last, MISSING) if isinstance(node, dict) else MISSING


def require_effects(recipe: Recipe, *, origin: str) -> None:
    """Checks that every setting of a recipe that somebody hands in does something where it stands."""
    try:
        check_effects(recipe)
    except ValueError as error:
        raise UserError(f"recipe {origin!r} has a setting without effect:\n  {error}") from None


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Returns a recipe with `dotted.path=value` changes, checked like any recipe."""
    document = recipe.model_dump(mode="json")
    for override in overrides:
        _override(document, override)
    return validate(document, origin=recipe.name)


def with_values(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    """Returns a recipe with plain values at dotted paths, checked like any recipe."""
    document = recipe.model_dump(mode="json")
    for path, value in values.items():
        set_path(document, path, value)
    return validate(document, origin=recipe.name)


def dumps(recipe: Recipe) -> str:
    """Returns what a recipe sets as JSON for a pipeline argument; the schema has the defaults.

    It is short, as Kubernetes keeps a dozen copies of it. The letters of `python3` are escaped: the local engine
    replaces that word in every argument by the interpreter's path, also inside `/usr/lib/python3.11/…`.
    """
    document = recipe.model_dump(mode="json", exclude_defaults=True)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).replace("python3", "python\\u0033")


def loads(text: str) -> Recipe:
    """Reads what `dumps` wrote."""
    return validate(json.loads(text), origin="recipe argument")


def to_yaml(recipe: Recipe, *, only_set: bool = False, as_written: bool = False) -> str:
    """Returns the resolved recipe as YAML.

    Args:
        recipe: The recipe.
        only_set: Leave out what is as the schema has it anyway.
        as_written: Take the names that people write, not those that runs have.
    """
    document = recipe.model_dump(mode="json", exclude_defaults=only_set)
    document = with_written_names(document) if as_written else document
    return yaml_text.dump(document, sort_keys=False, allow_unicode=True)


def differences(before: Any, after: Any, path: str = "") -> dict[str, list[Any]]:
    """Returns the values before and after of each dotted path in which two plain documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        differing: dict[str, list[Any]] = {}
        for key in sorted(before.keys() | after.keys()):
            differing |= differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        return differing
    return {} if before == after else {path: [before, after]}


def changed_paths(before: Any, after: Any) -> list[str]:
    """Returns one line for each dotted path whose value differs between two plain documents."""
    return [f"{path}: {old!r} → {new!r}" for path, (old, new) in differences(before, after).items()]


def set_path(document: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value at a dotted path of plain values, and makes the sections on the way that are not there.

    Raises:
        KeyError: a key on the way has a value that is no section; it is named.
    """
    *sections, last = path.split(".")
    node = document
    for key in sections:
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise KeyError(key)
        node = child
    node[last] = value


def _override(document: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise UserError(f"override {override!r} is not dotted.path=value, for example training.learning_rate=1e-4.")
    try:
        value = yaml_text.load(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not YAML; quote it.") from None
    path = path.strip()
    try:
        set_path(document, path, value)
        for same in {explain.as_written(path), explain.renamed().get(path, path)} - {path}:
            _taken(document, same)  # what the recipe says under the other name
    except KeyError as error:
        raise UserError(f"override {override!r}: {error.args[0]!r} is a value, it has no keys below it.") from None
