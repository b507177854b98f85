"""The house, measured: `python -m tests.rooms [--all]`; ends with 1 where a room is larger than it may be.

Cycles and fan-out count every import of one of our modules by another, also inside functions and under TYPE_CHECKING.
The fan-out of a module is the number of distinct modules of ours that it imports; a package's `__init__` counts as one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"fan-out": 15, "modules a folder": 24, "lines a file": 300, "lines a function": 50}
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "fan-out",
        "baton.components.shared.recipe",
    ): "one name for the whole schema: it re-exports what each section defines",
    ("fan-out", "baton.components.shared.recipe.sections"): "a recipe has as many sections as it has",
    (
        "lines a function",
        "components/data_split/component.py:data_split",
    ): "KFP reads a component's parameters, outputs and their docs from one function",
}
"""(limit, room) → why it may be larger; five at most."""


@dataclass(frozen=True)
class Size:
    """How large a room is by one measure."""

    limit: str
    room: str
    value: int

    @property
    def is_within(self) -> bool:
        """Whether it keeps the limit, or is excepted from it."""
        return self.value <= LIMITS[self.limit] or (self.limit, self.room) in EXCEPTIONS


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the groups of nodes that reach each other (strongly connected; Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in order:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == order[node]:
            at = stack.index(node)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                groups.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in order:
            visit(node)
    return groups


def imports() -> dict[str, set[str]]:
    """Returns for each module of ours the modules of ours that it imports."""
    graph = grimp.build_graph("baton", cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}


def between_folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns for each folder the folders beside it that its modules import from."""
    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        ours = module.split(".")
        for target in targets:
            theirs = target.split(".")
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if at is not None and len(ours) > at + 1 and len(theirs) > at + 1:
                found.setdefault(".".join(ours[: at + 1]), set()).add(".".join(theirs[: at + 1]))
    return found


def sources() -> list[Path]:
    """Returns the production code's files, as Git knows them."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "components/**.py", "pipelines/**.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [Path(name) for name in names if (ROOT / name).exists()]


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields each function's name and lines, without its decorators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            yield node.name, node.end_lineno - node.lineno + 1


def sizes(graph: dict[str, set[str]], files: list[Path]) -> list[Size]:
    """Returns every room by every measure."""
    found = [Size("fan-out", module, len(targets)) for module, targets in graph.items()]
    per_folder = Counter(str(file.parent) for file in files if file.name not in ("__init__.py", "__main__.py"))
    found += [Size("modules a folder", folder, count) for folder, count in per_folder.items()]
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        found.append(Size("lines a file", str(file), text.count("\n")))
        found += [Size("lines a function", f"{file}:{name}", lines) for name, lines in functions(ast.parse(text))]
    return found


def main() -> int:
    """Prints what is larger than it may be, and the largest of each kind with `--all`."""
    files, graph = sources(), imports()
    console = Console(width=140)
    knots = cycles(graph)
    rooms = cycles(between_folders(graph))
    for group in [*knots, *rooms]:
        console.print(f"[red]cycle[/]: {', '.join(group)}")
    measured = sizes(graph, files)
    too_large = [size for size in measured if not size.is_within]
    table = Table("limit", "room", "size", "at most")
    shown = (
        sorted(measured, key=lambda size: -size.value / LIMITS[size.limit])[:40] if "--all" in sys.argv else too_large
    )
    for size in shown:
        table.add_row(size.limit, size.room, str(size.value), str(LIMITS[size.limit]))
    if shown:
        console.print(table)
    lines = sum(size.value for size in measured if size.limit == "lines a file")
    text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    per_thousand = {
        "Any": 1000 * len(re.findall(r"\bAny\b", text)) / lines,
        "dict[str, Any]": 1000 * text.count("dict[str, Any]") / lines,
    }
    console.print(f"{len(files)} files, {lines:,} lines, {len(knots)} cycles of modules, {len(rooms)} of folders")
    console.print(
        "; ".join(f"{name} {value:.1f} times a thousand lines" for name, value in per_thousand.items()), markup=False
    )
    unused = [key for key in EXCEPTIONS if key not in {(size.limit, size.room) for size in measured}]
    if unused:
        console.print(f"[red]exceptions that nothing needs[/]: {unused}")
    return int(bool(knots or rooms or too_large or unused or len(EXCEPTIONS) > 5))


if __name__ == "__main__":
    sys.exit(main())
