"""A problem that pydantic has found in a recipe, in one line with the path, the value and what to write instead."""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from baton.components.shared.recipe.mistakes.names import ELSEWHERE, EXAMPLES, SHORT
from baton.components.shared.recipe.mistakes.yaml_text import brief
from baton.components.shared.recipe.recipe import Recipe

LIKE = 0.8
"""Likeness from which a key is taken for a misspelt one before it is looked for in other sections."""
NUMBER = re.compile(r"\s*([-+]?[\d.,_]*\d(?:[eE][-+]?\d+)?)\s*(%|[A-Za-z][A-Za-z ]*)?")
WORD = re.compile(r"[A-Za-z0-9_./-]+")
MEANT = "did you mean"


def explain(problem: Mapping[str, Any]) -> str:
    """Returns a problem in words.

    Args:
        problem: An entry of `ValidationError.errors()` of a recipe.
    """
    location = problem["loc"]
    if location and re.match(r"constrained|list\[|literal\[|str$", str(location[-1])):
        location = location[:-1]  # the member of a union that was tried
    path = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown key; {_instead_of(location)}"
    if problem["type"] == "missing":
        example = EXAMPLES.get(str(location[-1]))
        return f"{path}: missing, and it has no default" + (f"; write {location[-1]}: {example}" if example else "")
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    shown = (
        f" (got {brief(repr(value))})"
        if isinstance(value, str | int | float) and problem["type"] != "value_error"
        else ""
    )
    hint = next((f"; {hint}" for hint in _hints(problem, path, value)), "") if shown else ""
    return f"{path}: {message}{shown}{hint}" if path else message


def _instead_of(location: tuple[Any, ...]) -> str:
    """Returns what an unknown key may have been meant to be."""
    key, keys = str(location[-1]), _keys_at(location[:-1])
    here = ".".join(str(part) for part in location[:-1] if isinstance(part, str))
    if close := difflib.get_close_matches(key, keys, n=1, cutoff=LIKE):
        return f"{MEANT} {close[0]!r}?"
    known = ELSEWHERE.get(key)
    if known and known.rpartition(".")[0] == here:
        return f"{MEANT} {known.rpartition('.')[2]!r}?"
    others = [known] if known else [path for path in _all_paths() if path.rpartition(".")[2] == key]
    if others:
        depth = others[0].count(".")
        return f"it is {' or '.join(path for path in others if path.count('.') == depth)} here"
    if close := difflib.get_close_matches(key, keys, n=1, cutoff=0.6):
        return f"{MEANT} {close[0]!r}?"
    return f"known here: {', '.join(keys)}"


def _hints(problem: Mapping[str, Any], path: str, value: Any) -> Iterator[str]:
    """Yields what may be written instead of a value of the wrong kind."""
    kind, text = str(problem["type"]), str(value).strip()
    if kind == "literal_error":
        expected = re.findall(r"'([^']+)'", problem["msg"])
        yield from (f"{MEANT} {each!r}?" for each in difflib.get_close_matches(text.lower(), expected, n=1))
    elif kind == "list_type":
        yield f"write [{value}]"
    elif kind in ("model_type", "model_attributes_type", "dict_type") and path in SHORT and WORD.fullmatch(text):
        yield f"write {path.rpartition('.')[2]}: {{{SHORT[path]}: {value}}}"
    elif kind == "string_type":
        yield f"write it in quotes: {text!r}"
    elif kind in ("float_parsing", "int_parsing") and (match := NUMBER.fullmatch(text)):
        yield from _as_number(match, whole=kind == "int_parsing")
    elif kind == "string_pattern_mismatch":
        pattern = problem["ctx"]["pattern"]
        slug = re.sub(r"[^a-z0-9]+", "-", text.lower())[:63].strip("-")
        quantity = re.sub(r"(?i)^([\d.]+) *([kmgtpe])(i?)b?$", lambda m: f"{m[1]}{m[2].upper()}{m[3].lower()}", text)
        yield from (f"{MEANT} {each!r}?" for each in (quantity, slug) if re.search(pattern, each))


def _as_number(match: re.Match[str], *, whole: bool) -> Iterator[str]:
    digits = match[1].replace(",", "").replace("_", "")
    if match[2] == "%" and not whole:
        yield f"write {float(digits) / 100:g}"
    elif match[2] != "%" and (not whole or digits.lstrip("+-").isdigit()):
        yield f"write {digits}"


def _keys_at(location: tuple[Any, ...]) -> list[str]:
    """Returns the field names of the section at a location of the schema."""
    model: type[BaseModel] | None = Recipe
    for part in location:
        field = model.model_fields.get(str(part)) if model else None
        if field is not None:
            model = _section_of(field.annotation)
    return list(model.model_fields) if model else []


@functools.cache
def _all_paths() -> tuple[str, ...]:
    return tuple(_paths())


def _paths(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yields the paths of all fields that are in no list, the shallow ones first."""
    inner: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        yield prefix + name
        section = _section_of(field.annotation)
        if section and "list[" not in str(field.annotation) and name != "sweep":
            inner.append((section, f"{prefix}{name}."))
    for section, path in inner:
        yield from _paths(section, path)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, typing.Annotated):
        for argument in typing.get_args(annotation):
            if section := _section_of(argument):
                return section
    return None
