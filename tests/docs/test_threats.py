"""Tests named by docs/internals/threats.md exist; each threat names one, or has none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACTORS = ("Bucket owner", "Pod neighbour", "Data author", "Model author", "Recipe author", "Network")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
CELL = re.compile(r"(?<!\\)\|")


def _section() -> str:
    text = (ROOT / "docs/internals/threats.md").read_text(encoding="utf-8")
    return text.partition("\n## Actors\n")[2].partition("\n## ")[0]


def _rows() -> list[list[str]]:
    lines = [line for line in _section().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in CELL.split(line)[1:-1]] for line in lines if not line.startswith("| attempt")]


def _missing(cell: str) -> list[str]:
    """Returns the tests of a cell that are not there."""
    missing = []
    for file, name in TEST.findall(cell):
        if not (ROOT / file).is_file():
            missing.append(file)
        elif name:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
                missing.append(f"{file}::{name}")
    return missing


def test_every_actor_has_rows() -> None:
    assert re.findall(r"^\*\*(.+?)\*\*:", _section(), re.MULTILINE) == list(ACTORS)
    assert len(_rows()) > 50
    assert {len(row) for row in _rows()} == {3}


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0][:60])
def test_a_rows_tests_are_there(row: list[str]) -> None:
    *_, what, tests = row
    assert _missing(tests) == []
    assert TEST.search(tests) or (tests == "none" and "**" in what), "what is not tested says that it is not prevented"
    assert not re.sub(r"`[^`]*`|none|[, ]", "", tests)


def test_a_test_that_is_not_there_is_noticed() -> None:
    here = "tests/docs/test_threats.py"
    assert _missing(f"`{here}::test_every_actor_has_rows`, `{here}`") == []
    assert _missing(f"`{here}::test_nothing`, `tests/docs/test_nowhere.py::test_x`") == [
        f"{here}::test_nothing",
        "tests/docs/test_nowhere.py",
    ]
