"""Kinds of values and tables of keys, by which a file of another trainer is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args, get_origin, overload

from baton.importers.draft import EMPTY, Draft, Result
from baton.recipe.methods import SPECS
from baton.recipe.training import Training

# --- Kinds of values: what a key of another trainer may hold, and how it is read.


Read = TypeVar("Read")
Other = TypeVar("Other")
Kind = Callable[[object], object]


class UnsupportedError(Exception):
    """A value that is fine for the other trainer and that Baton has nothing for; the text says what to do."""


@overload
def read(draft: Draft, key: str, kind: Callable[[object], Read]) -> Read | None: ...
@overload
def read(draft: Draft, key: str, kind: Callable[[object], Read], default: Other) -> Read | Other: ...
def read(draft: Draft, key: str, kind: Callable[[object], Read], default: object = None) -> object:
    """Returns a key's value, the default where it has none or one that Baton has nothing for.

    Raises:
        UserError: the value cannot be meant.
    """
    value = draft.get(key)
    if value is None:
        return default
    try:
        return kind(value)
    except UnsupportedError as error:
        draft.left(key, str(error))
        return default
    except ValueError as error:
        raise draft.wrong(key, str(error)) from None


def is_on(draft: Draft, key: str) -> bool:
    """Tells whether a key is there and true.

    Raises:
        UserError: its value is neither true nor false.
    """
    return draft.has(key) and read(draft, key, boolean, False)


def positive_int(value: object) -> int:
    """Returns a whole number above 0."""
    result = number(value)
    if result < 1 or result != int(result):
        raise ValueError("a whole number above 0")
    return int(result)


def number(value: object) -> float:
    """Returns a number, also where YAML 1.1 reads text: it takes `1e-4` for a word."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number")
    try:
        result = float(value)
    except (ValueError, OverflowError):
        raise ValueError("a number") from None
    if not math.isfinite(result):
        raise ValueError("a number")
    return result


def non_negative_int(value: object) -> int:
    """Returns a whole number, 0 included."""
    result = number(value)
    if result < 0 or result != int(result):
        raise ValueError("a whole number")
    return int(result)


def times(value: object) -> int | None:
    """Returns how often in an epoch, None for 0; less than once is not a whole number of times."""
    if number(value) % 1:
        raise UnsupportedError("only a whole number of times in an epoch; give a number of steps instead")
    return non_negative_int(value) or None


def numbers(value: object) -> list[float]:
    """Returns a list of numbers."""
    if not isinstance(value, list):
        raise ValueError("a list of numbers")
    return [number(item) for item in value]


def positive(value: object) -> float | None:
    """Returns a number above 0, None for 0: what it is for is off then."""
    return number(value) or None


def steps(value: object) -> int:
    """Returns a number of steps; a share of all steps, which Transformers takes as well, is none."""
    if 0 < number(value) < 1:
        raise UnsupportedError("a share of all steps; give a number of steps")
    return positive_int(value)


def boolean(value: object) -> bool:
    """Returns true or false, also from the words that Transformers' arguments take."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]


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
        return {name.strip(): _plain(given.strip()) for name, given in pairs}
    if not isinstance(value, dict):
        raise ValueError("keys and values")
    return {str(name): _plain(given) if isinstance(given, str) else given for name, given in value.items()}


def _plain(value: str) -> float | bool | str:
    try:
        return number(value)
    except ValueError:
        return {"true": True, "false": False}.get(value.lower(), value)


def choice(allowed: tuple[str, ...], aliases: Mapping[str, str], why: str) -> Callable[[object], str]:
    """Returns a kind for names of which Baton has some, with other names of the same, and what to do without one."""

    def named(value: object) -> str:
        name = aliases.get(text(value), text(value))
        if name not in allowed:
            raise UnsupportedError(why)
        return name

    return named


def names_of(field: str) -> tuple[str, ...]:
    """Returns the names that a setting of `training` allows."""
    annotation = Training.model_fields[field].annotation
    assert get_origin(annotation) is Literal, field
    return tuple(str(name) for name in get_args(annotation))


# --- The format of the tables that say what becomes of another trainer's keys, and what deals with a file by them.


Entry = Callable[[Draft, str], None]
"""What becomes of a key: a `Carried`, or a function where it takes more than a line."""
Table = dict[str, Entry]
"""By key; one that ends in `*` stands for all that begin so and have no nearer entry."""


@dataclass(frozen=True)
class Carried:
    """A key whose value the recipe has. It has no effect where the recipe has no such section.

    Attributes:
        path: Where it has it; `{method}` stands for the training method.
        kind: Reads the value, None for one that asks for nothing; raises `ValueError` with what it expects, or
            `UnsupportedError`.
        default: What the other trainer takes where the file leaves the key out and Baton does not.
        methods: The methods with which it has an effect, where `path` does not name one.
    """

    path: str
    kind: Kind
    default: object = None
    methods: tuple[str, ...] = ()

    def __call__(self, draft: Draft, key: str) -> None:
        """Sets the recipe's value, or notes why it has none."""
        section, *names = self.path.split(".")
        method = draft.look("training.method")
        methods = self.methods or [name for name in names[:1] if name in SPECS]
        if section == "adapter" and draft.look(section) is None:
            draft.drop(key, "has no effect without adapter", Result.needless)
        elif methods and method not in methods:
            draft.drop(key, f"has no effect with {method}", Result.needless)
        elif (value := read(draft, key, self.kind, self.default)) is None:
            draft.rest(key)
        else:
            draft.put(self.path.format(method=method), value, key)


def noted(why: str, fate: Result) -> Entry:
    """Returns the entry of a key that is not carried over: why, what to do instead, and whether something is lost."""
    return lambda draft, key: draft.drop(key, why, fate)


def table(
    carried: Mapping[str, Entry],
    left: Mapping[str, str] | None = None,
    needless: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> Table:
    """Returns a table, written down shortly.

    Args:
        carried: Entry by keys, with a space between them.
        left: Why not, and what to do instead → the keys that are not carried over.
        needless: Why → the keys that nothing is lost without.
        elsewhere: Where else it is said → the keys of names, places and logs: what is learned is the same.
    """
    entries = {key: entry for keys, entry in carried.items() for key in keys.split()}
    groups = {Result.left: left, Result.needless: needless, Result.elsewhere: elsewhere}
    for fate, reasons in ((fate, reasons or {}) for fate, reasons in groups.items()):
        for why, keys in reasons.items():
            entries.update(dict.fromkeys(keys.split(), noted(why, fate)))
    return entries


def apply_table(draft: Draft, entries: Table) -> None:
    """Deals with every key that is left: by its name, by how it begins, or as unknown."""
    families = sorted((key[:-1] for key in entries if key.endswith("*")), key=len, reverse=True)
    for key in draft.given:
        if draft.is_handled(key):
            continue
        family = next((family for family in families if key.startswith(family)), None)
        entry = entries.get(key) or (note_unknown if family is None else entries[f"{family}*"])
        if draft.given[key] in EMPTY:
            draft.rest(key)
        else:
            entry(draft, key)


def note_unknown(draft: Draft, key: str) -> None:
    """Notes that nothing is known of a key."""
    draft.left(key, f"unknown: no setting of {draft.tool} that this command knows; see docs/recipe.md")


def switch(draft: Draft, key: str) -> None:
    """Deals with a key that has an effect only where it is on, and has been dealt with then."""
    note_unknown(draft, key) if draft.has(key) else draft.rest(key)


def fill(draft: Draft, entries: Table, prefix: str = "") -> None:
    """Deals with the keys of a table before all others, and with those that the file leaves out."""
    for key, entry in entries.items():
        entry(draft, f"{prefix}{key}")
