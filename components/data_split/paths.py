"""Columns by path: a dot is a step into a mapping, or to a place in a list (`answers.text.0`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

DEEPEST, WIDEST = 3, 32
"""Steps of a path, and parts of a value within a column, that are looked for."""


def get(values: Any, name: str) -> Any:
    """Returns what a row has by a name, which may have dots, or a path; None where it has nothing."""
    if isinstance(values, dict):
        if name in values:
            return values[name]
        head, dot, rest = name.partition(".")
        while dot:
            if head in values:
                return get(values[head], rest)
            more, dot, rest = rest.partition(".")
            head = f"{head}.{more}"
        return None
    if isinstance(values, list):
        head, dot, rest = name.partition(".")
        if head.isascii() and head.isdigit() and len(head) < 10:
            part = values[int(head)] if int(head) < len(values) else None
            return get(part, rest) if dot else part
    return None


def of(values: Any, depth: int = DEEPEST) -> Iterator[str]:
    """Yields the names and paths of what a row has."""
    parts = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in parts if depth == DEEPEST else islice(parts, WIDEST):
        yield str(key)
        if depth > 1:
            yield from (f"{key}.{path}" for path in of(value, depth - 1))


def columns(present: list[str]) -> list[str]:
    """Returns the names without those that lie within another, sorted."""
    names = set(present)
    return sorted(name for name in names if not any(name[:at] in names for at, mark in enumerate(name) if mark == "."))
