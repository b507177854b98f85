"""The house, measured: `python -m tests.rooms [--all]`; ends with 1 where modules or folders import in a circle.

There is no limit on size. Cycles and fan-out count every import of one of our modules by another, also inside functions
and under TYPE_CHECKING. The fan-out of a module is the number of distinct modules of ours that it imports; a package's
`__init__` counts as one.
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
MEASURES = ("fan-out", "modules a folder", "lines a file", "lines a function")


@dataclass(frozen=True)
class Size:
    """How large a room is by one measure."""

    measure: str
    room: str
    value: int


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
    """Prints cycles and sums, and the largest rooms of each kind with `--all`."""
    files, graph = sources(), imports()
    console = Console(width=140)
    knots = cycles(graph)
    rooms = cycles(between_folders(graph))
    for group in [*knots, *rooms]:
        console.print(f"[red]cycle[/]: {', '.join(group)}")
    measured = sizes(graph, files)
    if "--all" in sys.argv:
        table = Table("measure", "room", "size")
        for measure in MEASURES:
            largest = sorted((size for size in measured if size.measure == measure), key=lambda size: -size.value)[:10]
            for size in largest:
                table.add_row(size.measure, size.room, str(size.value))
        console.print(table)
    lines = sum(size.value for size in measured if size.measure == "lines a file")
    text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    per_thousand = {
        "Any": 1000 * len(re.findall(r"\bAny\b", text)) / lines,
        "dict[str, Any]": 1000 * text.count("dict[str, Any]") / lines,
    }
    console.print(f"{len(files)} files, {lines:,} lines, {len(knots)} cycles of modules, {len(rooms)} of folders")
    console.print(
        "; ".join(f"{name} {value:.1f} times a thousand lines" for name, value in per_thousand.items()), markup=False
    )
    return int(bool(knots or rooms))


if __name__ == "__main__":
    sys.exit(main())
