"""The code, measured: `python -m tools.code_report [--root CHECKOUT] [--circles]`.

Production code is all Python but tests, tools and benchmarks. Nothing has a limit; `--circles` alone ends with 1, where
modules import each other in a circle. Imports count inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
APART = ("tests", "tools", "benchmarks", "examples", "docs", "build")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
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
    """Returns for each module of the package the modules of it that it imports."""
    graph = grimp.build_graph("baton", cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}


class Module:
    """A file of production code.

    Attributes:
        name: As it is imported, with neither links nor `baton.` in front of the leaf folders.
        lines: All lines.
        code: Lines that are neither blank, comments nor docstrings.
        imports: Lines of import statements.
        comments: Lines that are comments alone.
        functions: Functions and methods; `short` are those of one statement, docstring aside.
    """

    def __init__(self, root: Path, path: Path) -> None:
        parts = list(path.relative_to(root).with_suffix("").parts)
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        text = path.read_text(encoding="utf-8").splitlines()
        self.lines = len(text)
        of_docstrings: set[int] = set()
        of_imports: set[int] = set()
        self.functions = self.short = 0
        self.classes: list[str] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                of_imports |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                of_docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif isinstance(node, ast.ClassDef):
                self.classes.append(node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                self.functions += 1
                self.short += len(body) == 1 and not isinstance(
                    body[0], ast.With | ast.Try | ast.For | ast.While | ast.If
                )
        blank = {at for at, line in enumerate(text, 1) if not line.strip()}
        comments = {at for at, line in enumerate(text, 1) if line.strip().startswith("#")}
        self.imports, self.comments = len(of_imports), len(comments - of_docstrings)
        self.code = self.lines - len(blank | comments | of_docstrings)

    def imported(self, names: set[str]) -> Iterator[str]:
        """Yields the modules of ours that it imports, wherever it does."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    candidates = map(_plain, (f"{node.module}.{alias.name}", node.module))
                    yield from [each for each in candidates if each in names][:1]
            elif isinstance(node, ast.Import):
                yield from (each for each in (_plain(alias.name) for alias in node.names) if each in names)

    def package(self) -> str:
        """Returns the room that it lies in."""
        return ".".join(self.name.split(".")[:2]) if self.name.startswith("baton.") else self.name.partition(".")[0]


def _plain(name: str) -> str:
    """Returns a module's name without the link that leads to its folder."""
    inner = name.removeprefix("baton.")
    return inner if inner.startswith(("components", "pipelines")) else name


def production(root: Path) -> list[Module]:
    """Returns the production code of a checkout, as Git knows it."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    paths = [root / name for name in names if not name.startswith(APART)]
    return [Module(root, path) for path in paths if path.is_file()]


def report(root: Path, console: Console) -> None:
    """Prints a table of the whole and one by package."""
    modules = production(root)
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for target in module.imported(names):
            if target != module.name:
                importers[target].add(module.name)
    filled = [module for module in modules if module.code]
    lines, functions = sum(each.lines for each in modules), sum(each.functions for each in modules)
    single = sum(len(importers[module.name]) == 1 for module in filled)
    of_classes = Counter(name for module in modules for name in module.classes)
    whole = Table("the whole", "", title=str(root.name))
    for what, value in (
        ("lines", f"{lines:,}"),
        ("code, without docstrings, comments, blank lines", f"{sum(each.code for each in modules):,}"),
        ("modules", f"{len(modules)}, {len(filled)} of them with code"),
        ("lines that are imports", f"{sum(each.imports for each in modules) / lines:.1%}"),
        ("lines that are comments", f"{sum(each.comments for each in modules) / lines:.1%}"),
        ("modules with a single importer", f"{single}, {single / len(filled):.0%}"),
        ("functions of one statement", f"{sum(each.short for each in modules) / functions:.0%} of {functions:,}"),
        ("class names used twice or more", str(sum(count > 1 for count in of_classes.values()))),
        ("modules behind components/gate/component.py", str(_behind("components.gate.component", modules, names))),
    ):
        whole.add_row(what, value)
    console.print(whole)
    table = Table("package", "modules", "lines", "code")
    by_package: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        by_package[module.package()].append(module)
    for package, inside in sorted(by_package.items()):
        sums = (len(inside), sum(each.lines for each in inside), sum(each.code for each in inside))
        table.add_row(package, *(f"{value:,}" for value in sums))
    console.print(table)


def _behind(start: str, modules: list[Module], names: set[str]) -> int:
    """Returns how many modules one leads to by its imports, itself left out."""
    by_name = {module.name: module for module in modules}
    seen, ahead = {start}, [start]
    while ahead:
        module = by_name.get(ahead.pop())
        for target in module.imported(names) if module else ():
            if target not in seen and by_name[target].code:
                seen.add(target)
                ahead.append(target)
    return len(seen) - 1


def main() -> int:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description="Measure the code.")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--circles", action="store_true", help="only look for circles of imports")
    given = parser.parse_args()
    console = Console(width=120)
    if not given.circles:
        report(given.root.resolve(), console)
        return 0
    found = circles(imports())
    for group in found:
        console.print(f"[red]circle[/]: {', '.join(group)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
