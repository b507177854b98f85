"""Kinds of values: what a key of another trainer may hold, and how it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, get_args, get_origin, overload

from baton.components.shared.recipe import Training
from baton.pipelines.importing.draft import Draft

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
    return draft.has(key) and read(draft, key, flag, False)


def whole(value: object) -> int:
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


def count(value: object) -> int:
    """Returns a whole number, 0 included."""
    result = number(value)
    if result < 0 or result != int(result):
        raise ValueError("a whole number")
    return int(result)


def times(value: object) -> int | None:
    """Returns how often in an epoch, None for 0; less than once is not a whole number of times."""
    if number(value) % 1:
        raise UnsupportedError("only a whole number of times in an epoch; give a number of steps instead")
    return count(value) or None


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
    return whole(value)


def flag(value: object) -> bool:
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
