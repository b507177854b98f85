"""Tests can fail: each of them asserts, expects an error, or calls a helper of the tests that does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
EXPECTS = {"raises", "warns", "fail", "check_call"}


class Sources:
    """The tests' modules, and what a name in one of them leads to."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.trees = {module: ast.parse(text) for module, text in sources.items()}
        self.functions = {
            module: {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
            for module, tree in self.trees.items()
        }
        self.imported = {module: dict(self._imports(tree)) for module, tree in self.trees.items()}

    def _imports(self, tree: ast.Module) -> list[tuple[str, tuple[str, str]]]:
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        return [(each.asname or each.name, (str(node.module), each.name)) for node in nodes for each in node.names]

    def find(self, module: str, name: str, of: str | None = None) -> tuple[str, Function] | None:
        """Finds a function by its name in a module, or by the name of the module or object that it is called on."""
        if of in self.imported[module]:
            package, inner = self.imported[module][of]
            module = f"{package}.{inner}"
        elif name in self.imported[module]:
            module, name = self.imported[module][name]
        places = [module]
        while "." in module:
            module = module.rpartition(".")[0]
            places.append(f"{module}.conftest")
        found = (place for place in places if name in self.functions.get(place, {}))
        return next(((place, self.functions[place][name]) for place in found), None)

    def can_fail(self, module: str, function: Function, seen: frozenset[str] = frozenset()) -> bool:
        """Tells whether a function asserts, itself or by what it calls or takes as a fixture."""
        if (name := f"{module}.{function.name}") in seen:
            return False
        called: list[tuple[str, str | None]] = [(argument.arg, None) for argument in function.args.args]
        for node in ast.walk(function):
            if isinstance(node, ast.Assert | ast.Raise):
                return True
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):  # a table of functions
                called += [(each, None) for each in self._in_table(module, ast.unparse(node.func.value))]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                is_plain = isinstance(node.func, ast.Name)
                own = node.func.id if is_plain else node.func.attr  # type: ignore[union-attr]
                of = getattr(getattr(node.func, "value", None), "id", None)
                checks = any(each.arg == "check" and getattr(each.value, "value", 0) is True for each in node.keywords)
                if own in EXPECTS or checks:
                    return True
                called.append((own, of))
        helpers = filter(None, (self.find(module, own, of) for own, of in called))
        return any(self.can_fail(place, helper, seen | {name}) for place, helper in helpers)

    def _in_table(self, module: str, name: str) -> list[str]:
        """Returns the names that a table of a module holds."""
        tables = (node for node in self.trees[module].body if isinstance(node, ast.Assign | ast.AnnAssign))
        held = (node.value for node in tables if ast.unparse(node).startswith((f"{name} =", f"{name}:")) and node.value)
        return [node.id for value in held for node in ast.walk(value) if isinstance(node, ast.Name)]

    def idle(self) -> list[str]:
        """Returns the tests that nothing can make fail, but for an error."""
        return [
            f"{module}.{name}"
            for module, functions in self.functions.items()
            for name, function in functions.items()
            if name.startswith("test_") and not self.can_fail(module, function)
        ]


def test_every_test_can_fail() -> None:
    paths = {path: path.relative_to(HERE.parent).with_suffix("").parts for path in HERE.rglob("*.py")}
    assert Sources({".".join(parts): path.read_text(encoding="utf-8") for path, parts in paths.items()}).idle() == []


@pytest.mark.parametrize(
    ("text", "is_idle"),
    [
        ("def test_it():\n    work()", True),
        ("def test_it():\n    found = work()\n    print(found)", True),
        ("def test_it():\n    assert work()", False),
        ("def test_it():\n    with pytest.raises(ValueError):\n        work()", False),
        ("def check():\n    assert work()\n\ndef test_it():\n    check()", False),
        ("from tests.helping import check\n\ndef test_it():\n    check()", False),
        ("from tests import helping\n\ndef test_it():\n    helping.check()", False),
        ("from tests import helping\n\ndef test_it():\n    helping.work()", True),
        ("def test_it(checked):\n    work()", False),
        ("def check():\n    assert work()\n\nALL = {1: check}\n\ndef test_it():\n    ALL[1]()", False),
        ("def work():\n    pass\n\nALL = {1: work}\n\ndef test_it():\n    ALL[1]()", True),
    ],
)
def test_an_idle_test_is_found(text: str, is_idle: bool) -> None:
    helping = "def check():\n    assert 1 == work()\n\ndef work():\n    return 1"
    fixture = "def checked():\n    yield 1\n    assert work()"
    found = Sources({"tests.some.test_one": text, "tests.helping": helping, "tests.conftest": fixture}).idle()
    assert found == (["tests.some.test_one.test_it"] if is_idle else [])
