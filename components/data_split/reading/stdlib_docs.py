"""Real text that is on every machine with Python: the standard library's signatures and docstrings."""

from __future__ import annotations

import ast
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
MAX_DOC = 400
"""Longest docstring taken, in characters: one paragraph."""


def rows() -> Iterator[dict[str, str]]:
    """Yields `{"prompt": signature, "completion": first paragraph of the docstring}`, files in name order.

    Files are parsed, never imported.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(file.relative_to(root).parts):
            yield from _documented(file)


def _documented(file: Path) -> Iterator[dict[str, str]]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
            paragraph = " ".join(doc.split("\n\n", 1)[0].split())
            if 20 <= len(paragraph) <= MAX_DOC and paragraph.isascii():
                signature = f"def {node.name}({ast.unparse(node.args)}):"
                yield {"prompt": signature, "completion": paragraph}


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields what `ast.walk` does, in its order, but for expressions: no function is defined in one."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        todo.extend(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        )
        yield node
