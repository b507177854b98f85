"""The bytes of a recipe, and changes to it, through what `baton validate` does before it needs a model.

An input is a file; what follows `SET` in it is the argument of a `--set`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from baton.compiler import pipeline_file
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.plan import make_plan
from baton.runs.run import identity
from baton.source import prepare
from tools.fuzz import trees
from tools.fuzz.target import Mutate, Target, require_message, scratch

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SET = b"\n\0--set "
ROWS = 1000
"""Rows that a plan is made for."""
PIECES = (
    *("&a [*a]", "&a {b: *a}", "*a", "&a", "<<: *a", "<<: 1", "<<: [1]", "<<: {<<: {a: 1}}", "? [a]\n: b", "? {a: b}"),
    *("!!python/object/apply:os.system [x]", "!!python/name:os.system", "!!binary =", "!!binary é", "!!timestamp x"),
    *("!!int x", "!!float x", "!!bool x", "!!null x", "!!set {a}", "!!omap [a: b]", "!!omap [1]", "!!pairs [a: b]"),
    *(
        "!!str {}",
        "!!map []",
        "!!seq {}",
        "!x y",
        "!<x> y",
        "!",
        "%YAML 1.3\n---\n",
        "%TAG ! x\n---\n",
        "---\n",
        "...\n",
    ),
    *("2001-99-99", "2001-12-14t21:59:43.10-05:00", "9999-12-31T23:59:59-99:99", "0001-01-01T00:00:00+23:59"),
    *(
        "0b_",
        "0x_",
        "0o7",
        "0_",
        "1:99",
        "190:20:30.15",
        "+.inf",
        ".nan",
        "._",
        "-._",
        "1__0",
        "=",
        "~",
        "\t",
        "\ufeff",
    ),
    *("\x85", "\u2028", "|2+\n", "|9\n", ">-\n", "'", '"', '"\\UFFFFFFFF"', '"\\ud800"', '"\\x"', '"\\N\\_\\L"', "# "),
    *(": ", "- ", "[", "]", "{", "}", ",", "[" * 2000, "{a: " * 1500, "- " * 1000, "9" * 5000, "0b" + "1" * 5000),
    *("1" + ":59" * 500, "1" * 400 + ".5", "1e400", "x" * 4000),
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nname: [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n",
)
"""What YAML knows and recipes do not need."""


@functools.cache
def _home() -> Path:
    """Returns the folder of the recipe, with what recipes mostly name."""
    for name in ("rows.jsonl", "train.jsonl", "hooks.py"):
        (scratch() / name).touch()
    (scratch() / "model").mkdir()
    return scratch()


def run(data: bytes) -> None:
    """Reads a recipe; it is one, or there is a message."""
    logging.disable()
    os.chdir(_home())
    text, *changes = data.split(SET)
    path = Path("recipe.yaml")
    path.write_bytes(text)
    try:
        loaded = prepare.load(str(path), [change.decode("utf-8", "surrogateescape") for change in changes])
    except UserError as error:
        require_message(error)
        return
    recipe = loaded.recipe
    _require_round_trips(recipe)
    for part in recipe.phase_recipes() or [recipe]:
        identity(part)
        with _refused():
            make_plan(part, ROWS)
    pipeline_file.cluster_warnings(recipe)
    with _refused():
        pipeline_file.for_cluster(recipe)
    with _refused():
        prepare.require_consent(recipe, dataclasses.replace(loaded.origin, is_foreign=True))
    # A pattern is looked for where it points, which may be everywhere.
    sources = [each.uri for part in recipe.phase_recipes() or [recipe] for each in part.data.sources]
    if not any(glob.has_magic(uri) and uri.startswith(("/", "~", "..")) for uri in sources):
        with _refused():
            loaded.localised()


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        require_message(error)


def _require_round_trips(recipe: Recipe) -> None:
    """Checks that a recipe is the same after it was written, in each of the ways in which it is."""
    document = recipe.model_dump(mode="json")
    assert load.validate(document, origin="as dumped") == recipe
    assert load.loads(load.dumps(recipe)) == recipe
    for only_set in (False, True):
        again = load.parse(load.to_yaml(recipe, only_set=only_set), origin="as YAML")
        assert load.validate(again, origin="as YAML") == recipe


def seeds() -> Iterator[bytes]:
    """Yields the recipes of this repository."""
    for folder in ("pipelines/recipes", "examples", "tests/recipes"):
        for path in sorted((ROOT / folder).rglob("*.yaml")):
            yield re.sub(rb"source: \S+", b"source: rows.jsonl", path.read_bytes())
            yield path.read_bytes()
    yield b"name: a\nmodel: {base: org/model}\ndata: {source: rows.jsonl}\nresources: {profile: auto}"
    yield b"name: a\nmodel: {base: org/model}\ndata: {source: rows.jsonl}" + SET + b"training.learning_rate=1e-4"
    yield from (piece.encode() for piece in PIECES)


@functools.cache
def _schema() -> dict[str, Any]:
    return Recipe.model_json_schema()


@functools.cache
def _fields() -> dict[str, list[dict[str, Any]]]:
    """Returns what the schema says of each key, wherever it stands."""
    fields: dict[str, list[dict[str, Any]]] = {}
    for section in (_schema(), *_schema()["$defs"].values()):
        for name, field in section.get("properties", {}).items():
            fields.setdefault(name, []).append(field)
    return fields


def _valid(schema: dict[str, Any], rng: Random, depth: int = 0) -> Any:
    """Returns a value that a schema may allow."""
    if reference := schema.get("$ref"):
        return _valid(_schema()["$defs"][reference.rpartition("/")[2]], rng, depth)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _valid(rng.choice(choices), rng, depth)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            known = list(schema.get("properties", {}).items())
            wanted = [each for each in known if each[0] in schema.get("required", ())]
            chosen = rng.sample(known, min(len(known), rng.randrange(3))) if depth < 4 else []
            return {name: _valid(field, rng, depth + 1) for name, field in [*wanted, *chosen]}
        case "array":
            return [_valid(schema.get("items", {}), rng, depth + 1) for _ in range(rng.randrange(3))]
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            return rng.choice((0, 1, 2, 3, 4, 8, 100))
        case "number":
            return rng.choice((0, 0.1, 0.5, 0.9, 1, 1e-4, 2.5))
        case "null":
            return None
        case _:
            return rng.choice(TEXTS)


def mutate(data: bytes, rng: Random, by_bytes: Mutate) -> bytes:
    """Changes a recipe in its values, in the lines of its text, or in a change to it."""
    text, *changes = data.split(SET)
    kind = rng.randrange(10)
    if kind < 6:
        text = _in_values(text, rng)
    elif kind < 9:
        text = _in_lines(text, rng)
    else:
        name, value = rng.choice(list(_fields())), rng.choice((*PIECES, "1", "true", "{}", "[]", "a.b=c"))
        changes = [*changes[:2], f"{rng.choice(('', 'training.', 'data.', 'chunks.'))}{name}={value}".encode()]
    return SET.join([text, *changes])


def _in_values(text: bytes, rng: Random) -> bytes:
    document, fields = yaml.load(text, yaml.CSafeLoader), _fields()

    def value() -> Any:
        if rng.random() < 0.4:
            return rng.choice(trees.VALUES)
        return _valid(rng.choice(fields[rng.choice(list(fields))]), rng)

    if rng.random() < 0.5:
        # A key that belongs to a section, with a value that may suit it.
        section, sub = rng.choice(list(_schema()["properties"].items()))
        document[section] = _merged(document.get(section), _valid(sub, rng))
    else:
        document = trees.mutate(document, rng, value, list(fields))
    return trees.dumps(document, default=str).encode("utf-8", "surrogatepass")


TEXTS = (
    *(
        "a",
        "a-b",
        "org/model",
        "model",
        "5m",
        "4Gi",
        "rows.jsonl",
        "*.jsonl",
        "**/x",
        "builtin:stdlib-docs",
        "hooks.py",
    ),
    *("s3://bucket/rows", "hf://datasets/a/b?split=train", "q_proj", ".*", "a.jinja", "{{ x }}", "{% for x in y %}"),
    *("{{ " + "(" * 500, "{% if x %}" * 500, "{{ " + "9" * 5000 + " }}", "chatml", "~/a", "a\0b", "x" * 300 + ".jinja"),
)


def _merged(before: Any, more: Any) -> Any:
    return before | more if isinstance(before, dict) and isinstance(more, dict) else more


def _in_lines(text: bytes, rng: Random) -> bytes:
    lines = text.split(b"\n")
    at = rng.randrange(len(lines))
    piece = rng.choice(PIECES).encode()
    match rng.randrange(6):
        case 0:
            lines.insert(at, piece)
        case 1:
            lines[at] = lines[at].partition(b":")[0] + b": " + piece
        case 2:
            lines[at] = b" " * rng.randrange(5) + lines[at].lstrip()
        case 3:
            lines.insert(at, lines[rng.randrange(len(lines))])
        case 4:
            del lines[at]
        case _:
            column = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:column] + piece + lines[at][column:]
    return b"\n".join(lines)


TARGET = Target(run=run, seeds=seeds, mutate=mutate, longest=3 * 2**12)
