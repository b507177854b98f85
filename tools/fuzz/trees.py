"""Changes documents by what they mean: values of another type, keys elsewhere, what is too long, deep or large."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Place = tuple[Any, Any]
"""A container and the key of one of its values."""

RAW = {
    "@digits": "9" * 5000,
    "@float": "1e999",
    "@nan": "NaN",
    "@deep": "[" * 3000 + "]" * 3000,
    "@deep-objects": '{"a":' * 2000 + "1" + "}" * 2000,
    "@surrogate": '"\\ud800"',
    "@twice": '{"a": 1, "a": 2}',
}
"""What `json.dumps` does not write: a text that stands for it → what is written."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63) - 1, 10**30, 0.0, -0.5, 0.5, 1.0, 1e-300, 1e308),
    *("", " ", "\0", "a\0b", "x" * 3000, "é", "\u2028", "\U0001f600", "../x", "../../../../etc/passwd", "/etc/passwd"),
    *("file:///etc/passwd", "s3://b/k", "hf://datasets/a/b", "~", "~nobody/x", ".", "..", "a/../b", "a\\b", "C:\\x"),
    *("null", "true", "1", "1e5", "1:30", "2024-01-01", "0x10", "auto", "none", "{}", "[]", "${x}", "{{ x }}", "*"),
    *([], {}, [[]], [{}], {"": 1}, {"a": {"b": {"c": [1, 2, {"d": None}]}}}, [1, "a", None], {"\0": 1}, {"a.b": 1}),
    *RAW,
)


def places(node: Any) -> Iterator[Place]:
    """Yields every place in a document."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from places(node[key])


def mutate(document: Any, rng: Random, value: Callable[[], Any], names: list[str]) -> Any:
    """Returns a document with a few changes.

    Args:
        document: Plain values.
        rng: Where chance comes from.
        value: Returns a value to put somewhere.
        names: Keys that mean something.
    """
    document = [copy.deepcopy(document)]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        known = list(places(document))
        (node, key), (other, its_key) = rng.choice(known), rng.choice(known)
        match rng.randrange(9):
            case 0 | 1 | 2:
                node[key] = value()
            case 3 if isinstance(node, dict):
                del node[key]
            case 4 if isinstance(node, dict):
                node[rng.choice(names)] = node.pop(key)
            case 5:
                node[key] = copy.deepcopy(other[its_key])
            case 6 if isinstance(node[key], dict):
                node[key][rng.choice(names)] = value()
            case 7 if isinstance(node[key], list):
                node[key].insert(rng.randrange(len(node[key]) + 1), value())
            case _:
                node[key] = nearby(node[key], rng)
    return document[0]


def nearby(value: Any, rng: Random) -> Any:
    """Returns a value that is like another."""
    match value:
        case bool():
            return not value
        case int():
            return value + rng.choice((-1, 1, 10, -value, 2**31, -2 * value))
        case float():
            return value * rng.choice((-1, 0, 0.5, 10, 1e300))
        case str() if value:
            at = rng.randrange(len(value))
            inserted = rng.choice(("", " ", "\0", "/", "..", "é", "0", ":", "@", "%", "\n", value))
            return value[:at] + inserted + value[at + rng.randrange(2) :]
        case list():
            return value * rng.choice((2, 50)) if len(value) < 50 else value[:1]
        case dict():
            return list(value.values())
        case _:
            return str(value)


def dumps(document: Any, **options: Any) -> str:
    """Writes a document, and in place of the texts of `RAW` what they stand for."""
    text = json.dumps(document, **options)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text
