"""Kinds of values and tables of keys, by which a file of another trainer is read.

A YAML file next to this module holds the tables. `carried`: keys → path, kind and, where it is to be written out, the
other trainer's default. `switches`: keys with an effect only where they are on. The other parts bear names of
`KeyResult`: reason → keys. `KEY*` matches all keys that begin so and have no nearer entry.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from baton.importers.draft import Entry, KeyResult, Kind, NoCounterpartError, RecipeDraft, Table, boolean
from baton.recipe import yaml_text
from baton.recipe.methods import SPECS


def number(value: object) -> float:
    """Returns a number, also from a text: YAML 1.1 reads `1e-4` as a word."""
    try:
        result = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise ValueError("a number")
    return result


def positive_int(value: object) -> int:
    """Returns a whole number above 0."""
    result = number(value)
    if result < 1 or result != int(result):
        raise ValueError("a whole number above 0")
    return int(result)


def non_negative_int(value: object) -> int:
    """Returns a whole number, 0 included."""
    result = number(value)
    if result < 0 or result != int(result):
        raise ValueError("a whole number")
    return int(result)


def positive(value: object) -> float | None:
    """Returns a number; None for 0, which turns its setting off."""
    return number(value) or None


def numbers(value: object) -> list[float]:
    """Returns a list of numbers."""
    if not isinstance(value, list):
        raise ValueError("a list of numbers")
    return [number(item) for item in value]


def times(value: object) -> int | None:
    """Returns a number of times in an epoch, None for 0."""
    if number(value) % 1:
        raise NoCounterpartError("only a whole number of times in an epoch; give a number of steps instead")
    return non_negative_int(value) or None


def steps(value: object) -> int:
    """Returns a number of steps; Transformers' share of all steps has no counterpart."""
    if 0 < number(value) < 1:
        raise NoCounterpartError("a share of all steps; give a number of steps")
    return positive_int(value)


def text(value: object) -> str:
    """Returns a text."""
    if not isinstance(value, str | int | float):
        raise ValueError("a text")
    return str(value)


def words(value: object) -> list[str]:
    """Returns a list of texts, also from one text with commas."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not all(isinstance(item, str | int | float) for item in value):
        raise ValueError("texts by commas, or a list of them")
    return [str(item).strip() for item in value]


def mapping(value: object) -> dict[str, object]:
    """Returns keys and values, also from `a=1,b=2`."""
    if isinstance(value, str) and all("=" in part for part in value.split(",")):
        pairs = [part.split("=", 1) for part in value.split(",")]
        value = {name.strip(): given.strip() for name, given in pairs}
    if not isinstance(value, dict):
        raise ValueError("keys and values")
    return {str(name): _plain(given) if isinstance(given, str) else given for name, given in value.items()}


def _plain(value: str) -> float | bool | str:
    try:
        return number(value)
    except ValueError:
        return {"true": True, "false": False}.get(value.lower(), value)


def choice(annotation: Any, why: str, aliases: Mapping[str, str] | None = None) -> Kind:
    """Returns a kind for the names of a `Literal`; `why` is the remedy for any other name."""
    assert get_origin(annotation), annotation
    allowed = get_args(annotation)

    def named(value: object) -> str:
        name = (aliases or {}).get(text(value), text(value))
        if name not in allowed:
            raise NoCounterpartError(why)
        return name

    return named


PLAIN_KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (number, positive_int, non_negative_int, positive, numbers, steps, boolean, text, words, mapping)
}


@dataclass(frozen=True)
class Carried:
    """A key with a place in the recipe; without effect where the recipe has no such section.

    Attributes:
        path: `{dpo,kto}` in it matches the training method; with others the key has no effect.
        kind: Reads the value.
        default: The other trainer's default, where Baton's differs.
    """

    path: str
    kind: Kind
    default: object = None

    def __call__(self, draft: RecipeDraft, key: str) -> None:
        section, *names = self.path.split(".")
        method = draft.peek("training.method")
        methods = names[0].strip("{}").split(",") if names and section == "training" else []
        if section == "adapter" and draft.peek(section) is None:
            draft.drop(key, "has no effect without adapter", KeyResult.not_needed)
        elif SPECS.keys() & methods and method not in methods:
            draft.drop(key, f"has no effect with {method}", KeyResult.not_needed)
        elif (value := draft.read(key, self.kind, self.default)) is None:
            draft.ignore(key)
        else:
            draft.put(re.sub(r"\{.*\}", method, self.path), value, key)


def tables(name: str, kinds: Mapping[str, Kind]) -> dict[str, Table]:
    """Returns the tables of a YAML file; `kinds` are its own, in addition to `PLAIN_KINDS`."""
    document = yaml_text.load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    return {title: _table(parts, {**PLAIN_KINDS, **kinds}) for title, parts in document.items()}


def _table(parts: dict[str, Any], kinds: Mapping[str, Kind]) -> Table:
    entries: Table = {}
    for keys, described in parts.get("carried", {}).items():
        path, kind, *default = described.split()
        entry = Carried(path, kinds[kind], *map(kinds[kind], default))
        entries.update(dict.fromkeys(keys.split(), entry))
    entries.update(dict.fromkeys(parts.get("switches", "").split(), switch))
    for result in KeyResult:
        for why, keys in parts.get(result.name, {}).items():
            entries.update(dict.fromkeys(keys.split(), noted(why, result)))
    return entries


def noted(why: str, result: KeyResult) -> Entry:
    """Returns the entry of a key that is not carried over."""
    return lambda draft, key: draft.drop(key, why, result)


def switch(draft: RecipeDraft, key: str) -> None:
    """Handles a key with an effect only where it is on; an earlier step has handled it then."""
    draft.unknown(key) if draft.has(key) else draft.ignore(key)
