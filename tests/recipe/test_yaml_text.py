"""YAML that no person writes: each is a message, in time and memory that do not depend on what is written."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import yaml

from baton.errors import UserError
from baton.recipe import load, yaml_text

LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefghi")
)
NONE = {
    "month": ("seed: 2001-99-99", "'2001-99-99' is not a valid timestamp: month must be in 1..12; put it in quotes"),
    "zone": ("seed: 2001-01-01T00:00:00+99:59", "is not a valid timestamp: offset must be"),
    "binary digits": ("seed: 0b_", "'0b_' is not a valid int: invalid literal"),
    "hexadecimal digits": ("seed: 0x_", "'0x_' is not a valid int: invalid literal"),
    "said to be an int": ("seed: !!int x", "'x' is not a valid int: invalid literal"),
    "said to be a float": ('seed: !!float ""', "'' is not a valid float: string index out of range"),
    "said to be a bool": ("seed: !!bool x", "'x' is not a valid bool: 'x'"),
    "said to be a timestamp": ("seed: !!timestamp x", "'x' is not a valid timestamp: "),
    "said to be a mapping": ("seed: !!map [a]", "expected a mapping node, but found sequence"),
    "character": (r'seed: "\UFFFFFFFF"', "line 1, column "),
    "half a character": (r'seed: "\ud800"', "is not a valid str: 'utf-16-le' codec can't decode"),
    "NUL": (r'seed: "a\0b"', "is not a valid str: it has a NUL, which YAML does not allow"),
    "digits": (f"seed: {'9' * 5000}", f"'{'9' * 200}…' is not a valid int: it has 5000 characters"),
    "bits": (f"seed: 0b{'1' * 20_000}", "is not a valid int: it has 20002 characters"),
    "an alias of itself": ("seed: &a [*a]", "an alias (*) repeats the section around it (line 1, column 7"),
    "an alias of itself in a key": ("seed: &a {*a : 1}", "an alias (*) repeats the section around it"),
    "aliases of aliases": (LAUGHS, "it has more than 100,000 values, those that aliases (*) repeat counted each time"),
    "brackets": ("seed: " + "[" * 2000, "it is nested deeper than 32 levels"),
    "lines": ("- " * 200, "it is nested deeper than 32 levels"),
    "long": ("# " + "x" * 2**20, "it is longer than 1 MiB"),
}


@pytest.mark.parametrize(("text", "message"), NONE.values(), ids=NONE)
def test_what_is_no_yaml_is_a_message(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load.parse(text, origin="r.yaml")
    assert str(caught.value).startswith("recipe 'r.yaml' is not YAML: ")
    assert message in str(caught.value)
    with pytest.raises(UserError, match="the value is not YAML"):
        load.parse("a: 1", [f"b={text}"], origin="r.yaml")


LONG = {
    "a number and spaces": "name: a\nseed: '1" + " " * 200_000 + "!'",
    "values": "[" + "1," * 200_000 + "]",
    "sixties": "a: 1" + ":59" * 300_000,
    "unknown keys": "\n".join(f"key{number}: v" for number in range(20_000)),
    "a mistake in a long text": "a: b: c\n" + "b: [1, 2, 3]\n" * 20_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_long_text_takes_seconds(text: str) -> None:
    began = time.process_time()

    with pytest.raises(UserError) as caught:
        load.validate(load.parse(text, origin="r.yaml"), origin="r.yaml")

    assert time.process_time() - began < 20  # 2 s on an idle machine; spaces took 300, keys 31, sixties 27
    assert len(str(caught.value)) < 20_000


TEXTS = [
    "1e5",
    "-2E+10",
    "1_0e-4",
    "1.5e3",
    "0x10",
    "1:30",
    "null",
    "2024-01-01",
    "é",
    "\U0001f600",
    "a\x85b",
    "\x85\xa0\u2028",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_written_is_read_as_one(text: str) -> None:
    for document in ({"a": text}, {text: [text]}):
        assert yaml_text.load(yaml_text.dump(document, allow_unicode=True)) == document


def test_two_escapes_of_json_are_one_character() -> None:
    assert yaml_text.load(r'"\ud83d\ude00 \u00e9"') == "\U0001f600 é"


READ: dict[str, tuple[str, Any]] = {
    "aliases": ("a: &a {b: 1}\nc: [*a, *a]", {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}),
    "merged": ("a: &a {b: 1}\nc: {<<: *a, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    "levels": ("[" * 31 + "]" * 31, None),
}


@pytest.mark.parametrize(("text", "expected"), READ.values(), ids=READ)
def test_what_people_write_is_read(text: str, expected: Any) -> None:
    assert yaml_text.load(text) == (expected or yaml.safe_load(text))


@pytest.mark.parametrize("text", ["!!binary aGk=", "!!omap [a: b]", "!!pairs [a: b]", "!!set {a}"])
def test_what_json_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor for the tag"):
        yaml_text.load(f"a: {text}")
