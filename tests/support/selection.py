"""Which tests run today: a share of all, and those whose code a change touches."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("baton", "tests", "tools")
METHODS = "baton.train.methods"

Graph = Mapping[str, Collection[str]]
"""Module → modules that import it."""


def draw(*words: str) -> int:
    """Returns the number that decides for some words, the same everywhere."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "big")


def in_share(test: str, share: str) -> bool:
    """Tells whether a test is in a share, such as `7/13`: each test is in exactly one of thirteen that follow."""
    number, count = map(int, share.split("/"))
    return draw(test) % count == number % count


def importers() -> dict[str, set[str]]:
    """Returns the graph of imports of code and tests, with modules that are imported by their name."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    found = {module: set(graph.find_modules_that_directly_import(module)) for module in graph.modules}
    for method in graph.find_children(METHODS):
        found[method].add(METHODS)
    for module in graph.modules:
        path = _file(module)
        if module.startswith("tests.") and path.is_file():
            for name in re.findall(r'import_module\("([\w.]+)"\)', path.read_text(encoding="utf-8")):
                for each in found:
                    if each == name or (each.startswith("tests.") and each.endswith(f".{name}")):
                        found[each].add(module)
        folder, _, name = module.rpartition(".")
        above = folder
        while name.startswith("test_") and above.count("."):  # what tests/conftest.py holds decides no test's result
            if f"{above}.conftest" in found:
                found[f"{above}.conftest"].add(module)
            above = above.rpartition(".")[0]
    return found


def _file(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def modules_of(paths: Iterable[str], graph: Graph) -> set[str]:
    """Returns the modules of some files; another file of the library stands for the nearest folder's modules."""
    found: set[str] = set()
    for path in map(Path, paths):
        parts = list(path.with_suffix("").parts if path.suffix == ".py" else path.parent.parts)
        if parts[:1] in (["components"], ["pipelines"]):
            parts.insert(0, "baton")
        if path.suffix == ".py":
            found.add(".".join(parts).removesuffix(".__init__"))
        elif parts[:1] == ["baton"]:
            folders = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
            inside = ({module for module in graph if module.rpartition(".")[0] == folder} for folder in folders)
            found |= next(filter(None, inside))
    return found & graph.keys()


def distances(changed: Iterable[str], graph: Graph) -> dict[str, int]:
    """Returns how many imports lead from each module to the nearest changed one, for those that any lead from."""
    found = dict.fromkeys(changed, 0)
    ahead = list(found)
    for module in ahead:
        for importer in graph.get(module, ()):
            if importer not in found:
                found[importer] = found[module] + 1
                ahead.append(importer)
    return found


def distance(test: str, found: Mapping[str, int]) -> int | None:
    """Returns a test's distance to what changed: from its file, or from a training method that its id names."""
    path, _, name = test.partition("::")
    methods = [f"{METHODS}.{word}" for word in re.findall(r"[a-z0-9]+", name.partition("[")[2])]
    modules = [path.removesuffix(".py").replace("/", "."), *methods]
    return min((found[module] for module in modules if module in found), default=None)
