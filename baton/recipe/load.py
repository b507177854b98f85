"""Reading a recipe: YAML, overrides by dotted path, and messages that name the key and the remedy."""

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

MOST_PROBLEMS = 50  # most problems of a message: each is compared with all keys, which takes a while


MISSING: Any = object()


class _Read(dict[str, Any]):
    """A recipe's values, with their text and the overrides."""

    text = ""
    overrides: tuple[str, ...] = ()


def load(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and checks a recipe file; `overrides` are `dotted.path=value`, the value in YAML, applied in order."""
    return validate(read(path, overrides), origin=path)


def read(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a recipe file as plain values, not checked yet."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"recipe {path!r} is not a file.", remedy="Give the path of a YAML recipe.")
    return parse(decode(file.read_bytes(), origin=path), overrides, origin=path)


def decode(data: bytes, *, origin: str) -> str:
    """Returns a recipe's text, in an encoding of YAML."""
    try:
        return yaml_text.decode(data)
    except yaml.YAMLError as error:
        raise UserError(f"recipe {origin!r} is not YAML: {error}.") from None


def parse(source: str | Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str) -> dict[str, Any]:
    """Reads YAML, or plain values, which are copied, as a recipe that is not checked yet."""
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
    """Checks a recipe's plain values; the error has a line per problem, with the dotted path."""
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


def stored(document: dict[str, Any], *, origin: str) -> Recipe:
    """Checks the recipe of a run or sweep in the store, which was checked before it was written there."""
    try:
        return validate(document, origin=origin)
    except UserError as error:
        remedy = "It is damaged, or of another Baton: put it back from a copy of the store, or choose another name."
        raise UserError(error.message, remedy=remedy) from None


def _written(document: Mapping[str, Any], location: tuple[str | int, ...]) -> str | None:
    """Returns a scalar's text in the recipe, None where that is not known."""
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
    """Returns a recipe's plain values with fields' names in place of people's; see `WrittenAs`."""
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
    """Returns a recipe's plain values with people's names in place of fields'."""
    changed = copy.deepcopy(document)
    for part in _trainings(changed):
        for theirs, ours in explain.renamed().items():
            if (value := _taken(part, ours)) is not MISSING:
                set_path(part, theirs, value)
    return changed


def former_names(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the former name and today's of each setting that a recipe gives by the former."""
    parts = _trainings(copy.deepcopy(document))
    names = explain.renamed().items()
    return [(ours, theirs) for theirs, ours in names if any(_taken(part, ours) is not MISSING for part in parts)]


def _trainings(document: dict[str, Any]) -> list[dict[str, Any]]:
    phases = document.get("phases")
    return [document, *(part for part in (phases if isinstance(phases, list) else []) if isinstance(part, dict))]


def _taken(document: dict[str, Any], path: str) -> Any:
    """Removes and returns the value at a dotted path; `MISSING` where there is none."""
    *sections, last = path.split(".")
    node: Any = document
    for key in sections:
        node = node.get(key) if isinstance(node, dict) else None
    return node.pop(last, MISSING) if isinstance(node, dict) else MISSING


def require_effects(recipe: Recipe, *, origin: str) -> None:
    """Checks that every setting of a recipe that somebody hands in has an effect."""
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
    """Returns a recipe's settings as JSON for a pipeline argument: short, as Kubernetes keeps a dozen copies of it."""
    document = recipe.model_dump(mode="json", exclude_defaults=True)
    # The local engine replaces `python3` in every argument by the interpreter's path, also inside a longer word.
    return json.dumps(document, sort_keys=True, separators=(",", ":")).replace("python3", "python\\u0033")


def loads(text: str) -> Recipe:
    """Reads the output of `dumps`."""
    return validate(json.loads(text), origin="recipe argument")


def to_yaml(recipe: Recipe, *, only_set: bool = False, as_written: bool = False) -> str:
    """Returns the resolved recipe as YAML: `only_set` without defaults, `as_written` with people's names, not runs'."""
    document = recipe.model_dump(mode="json", exclude_defaults=only_set)
    document = with_written_names(document) if as_written else document
    return yaml_text.dump(document, sort_keys=False, allow_unicode=True)


def differences(before: Any, after: Any, path: str = "") -> dict[str, list[Any]]:
    """Returns dotted path → values before and after, where two plain documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        differing: dict[str, list[Any]] = {}
        for key in sorted(before.keys() | after.keys()):
            differing |= differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        return differing
    return {} if before == after else {path: [before, after]}


def changed_paths(before: Any, after: Any) -> list[str]:
    """Returns a line for each dotted path where two plain documents differ."""
    return [f"{path}: {old!r} → {new!r}" for path, (old, new) in differences(before, after).items()]


def set_path(document: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value at a dotted path, with missing sections on the way; `KeyError` names a key that is no section."""
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
            _taken(document, same)  # the recipe's value under the other name
    except KeyError as error:
        raise UserError(f"override {override!r}: {error.args[0]!r} is a value, it has no keys below it.") from None
