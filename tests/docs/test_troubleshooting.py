"""The errors that the page about them quotes are the code's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
MESSAGES = QUOTED.findall((ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8"))


def _plain(text: str) -> str:
    """Returns a message as one line, with `…` for each run of variable parts."""
    return re.sub(r"…+", "…", " ".join(text.replace("'…'", "…").split()))


def _texts() -> Iterator[str]:
    for path in sorted((ROOT / "baton").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                yield _plain("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield _plain(node.value)


@pytest.fixture(scope="module")
def texts() -> str:
    return "\n".join(_texts())


def _is_said(message: str, texts: str) -> bool:
    """Tells whether a message is part of a text; a `…` may also be several parts with words between them."""
    fixed = (re.escape(part) for part in _plain(message).split("…"))
    return bool(re.search("(?:.*….*)".join(fixed), texts))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_error_is_one_of_the_code(message: str, texts: str) -> None:
    assert _is_said(message, texts)


def test_there_are_enough_and_another_one_is_noticed(texts: str) -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) >= 20
    assert not _is_said("store …: the … is purple.", texts)
