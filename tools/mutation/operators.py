"""The mutants of a file: small wrong changes, each of which some test is to notice.

A mutant replaces a stretch of the source, so that it reads as a diff. What only names or says things is left alone:
annotations, docstrings, messages of errors, logging, and the keywords of `SPOKEN`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "|"),
}
NAMES = {"max": "min", "min": "max", "any": "all", "all": "any"}
SPOKEN = {
    *("encoding", "name", "strict", "remedy", "reason", "message", "prefix", "thread_name_prefix", "what", "instead")
}
"""Keywords that only name or say something, or have Python check what the code relies on."""


@dataclass(frozen=True)
class Mutant:
    """A stretch of a file, and what stands there instead.

    Attributes:
        path: The file.
        function: Qualified name of what it lies in, empty for the module itself.
        operator: Kind of the change.
        first: First line of the stretch.
        last: Its last line.
        start: First byte of the stretch.
        stop: The byte after it.
        old: The stretch.
        new: What stands there instead.
        number: Tells it from those before it in the function with the same change.
    """

    path: str
    function: str
    operator: str
    first: int
    last: int
    start: int
    stop: int
    old: str
    new: str
    number: int = 0

    @property
    def key(self) -> str:
        """Its name, which stays where lines around it move."""
        old = " ".join(self.old.split())
        old = old if len(old) <= 60 else f"{old[:40]}…{old[-19:]}"
        return f"{self.path}:{self.function} {self.operator}: {old} -> {self.new} #{self.number}"

    def apply(self, source: bytes) -> bytes:
        """Returns the file with the change."""
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Returns all mutants of a file, in the order of its lines."""
    seen: Counter[str] = Counter()
    found = []
    for mutant in sorted(_Finder(path, source).all(), key=lambda each: (each.start, each.stop, each.operator)):
        numbered = Mutant(**{**vars(mutant), "number": seen[mutant.key]})
        seen[mutant.key] += 1
        found.append(numbered)
    return found


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def all(self) -> Iterator[Mutant]:
        """Yields all mutants."""
        yield from self._block(ast.parse(self._source).body, "")

    def _block(self, body: list[ast.stmt], function: str) -> Iterator[Mutant]:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                name = f"{function}.{statement.name}" if function else statement.name
                if isinstance(statement, ast.FunctionDef):
                    defaults = [*statement.args.defaults, *(each for each in statement.args.kw_defaults if each)]
                    for default in defaults:
                        yield from self._expression(default, name)
                yield from self._block(statement.body, name)
            elif not _is_idle(statement):
                yield from self._statement(statement, function)

    def _statement(self, node: ast.stmt, function: str) -> Iterator[Mutant]:
        yield from (self._at(node, function, *change) for change in _whole(node))
        if isinstance(node, ast.Raise):  # what it says is left alone
            return
        if isinstance(node, ast.If | ast.While):
            yield from self._condition(node.test, function)
        if isinstance(node, ast.With) and not any(item.optional_vars for item in node.items):
            stop = self._end(node.items[-1].context_expr)
            yield self._change(node, function, "without", self._start(node), stop, "if True")
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield self._at_body(handler.body, function, "unhandled", "raise")
            if node.finalbody:
                yield self._at_body(node.finalbody, function, "no finally", "pass")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._block([child], function)
                elif isinstance(child, ast.ExceptHandler):
                    yield from self._block(child.body, function)
                elif isinstance(child, ast.withitem):
                    yield from self._expression(child.context_expr, function)
                elif isinstance(child, ast.expr):
                    yield from self._expression(child, function)

    def _condition(self, test: ast.expr, function: str) -> Iterator[Mutant]:
        yield self._at(test, function, "condition", "True")
        yield self._at(test, function, "condition", "False")

    def _expression(self, node: ast.expr, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr):  # mostly messages
            return
        yield from self._operators(node, function)
        yield from self._constants(node, function)
        if isinstance(node, ast.Call):
            yield from self._call(node, function)
        if isinstance(node, ast.IfExp):
            yield from self._condition(node.test, function)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                yield from self._expression(child.iter, function)
                for test in child.ifs:
                    yield self._at(test, function, "condition", "True")
                    yield from self._expression(test, function)
            elif isinstance(child, ast.keyword):
                if child.arg not in SPOKEN:
                    yield from self._expression(child.value, function)
            elif isinstance(child, ast.expr):
                yield from self._expression(child, function)

    def _operators(self, node: ast.expr, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            lefts = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, lefts, node.comparators, strict=False):
                old, others = COMPARED[type(operator)]
                for new in others:
                    yield self._between(node, function, "comparison", left, right, old, new)
        elif isinstance(node, ast.BoolOp):
            old = "and" if isinstance(node.op, ast.And) else "or"
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield self._between(node, function, "logic", left, right, old, "or" if old == "and" else "and")
            for left_out in node.values:
                kept = f" {old} ".join(f"({self._text(each)})" for each in node.values if each is not left_out)
                yield self._at(node, function, "operand", kept)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._at(node, function, "not", f"({self._text(node.operand)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield self._at(node, function, "sign", self._text(node.operand))
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            old, new = COMPUTED[type(node.op)]
            yield self._between(node, function, "arithmetic", node.left, node.right, old, new)

    def _constants(self, node: ast.expr, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bool):
                yield self._at(node, function, "constant", str(not value))
            elif isinstance(value, int | float):
                yield self._at(node, function, "constant", str(value + 1))
            elif isinstance(value, str):
                yield self._at(node, function, "constant", repr(f"{value}-"))
        elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
            yield self._at(node, function, "name", NAMES[node.id])

    def _call(self, node: ast.Call, function: str) -> Iterator[Mutant]:
        plain = [each for each in node.args if not isinstance(each, ast.Starred)]
        is_symmetric = isinstance(node.func, ast.Name) and node.func.id in NAMES
        if len(plain) == len(node.args) >= 2 and not is_symmetric:
            first, second = plain[0], plain[1]
            texts = [self._text(each) for each in (first, second)]
            between = self._source[self._end(first) : self._start(second)].decode()
            yield self._change(
                node, function, "swap", self._start(first), self._end(second), f"{texts[1]}{between}{texts[0]}"
            )
        arguments = [*node.args, *(each.value for each in node.keywords)]
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in SPOKEN and len(arguments) > 1 and keyword.value is not arguments[0]:
                before = arguments[arguments.index(keyword.value) - 1]
                yield self._change(
                    node, function, "keyword", self._end(before), self._end(keyword.value), "", first=keyword.value
                )

    def _between(
        self, node: ast.expr, function: str, kind: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Mutant:
        start, stop = self._end(left), self._start(right)
        gap = self._source[start:stop].decode()
        pattern = re.escape(old).replace("\\ ", r"\s+")
        match = re.search(rf"(?<![\w<>=!*/]){pattern}(?![\w<>=*/])", re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), gap))
        assert match, (self._path, node.lineno, gap, old)
        at = start + len(gap[: match.start()].encode())
        return self._change(node, function, kind, at, at + len(match[0].encode()), new, first=right)

    def _at(self, node: ast.stmt | ast.expr, function: str, kind: str, new: str) -> Mutant:
        return self._change(node, function, kind, self._start(node), self._end(node), new)

    def _at_body(self, body: list[ast.stmt], function: str, kind: str, new: str) -> Mutant:
        return self._change(body[0], function, kind, self._start(body[0]), self._end(body[-1]), new)

    def _change(
        self,
        node: ast.stmt | ast.expr,
        function: str,
        kind: str,
        start: int,
        stop: int,
        new: str,
        *,
        first: ast.expr | None = None,
    ) -> Mutant:
        line = (first or node).lineno
        last = max(line, self._source[:stop].count(b"\n") + 1)
        old = self._source[start:stop].decode()
        return Mutant(self._path, function, kind, line, last, start, stop, old, new)

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _offset(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def _start(self, node: ast.stmt | ast.expr) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)


def _is_idle(node: ast.stmt) -> bool:
    """Tells statements that do nothing, or only say something."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.Assert | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        return name in ("__all__", "logger", "T", "R") or (
            isinstance(node.value, ast.Subscript) and name[0].isupper() and not name.isupper()
        )
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    called = node.value.func if isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "logger"


def _whole(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yields what can stand for a whole statement: the kind of the change, and the text."""
    removable = ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Break | ast.Continue
    binds = isinstance(node, ast.Assign) and any(_binds_names(each) for each in node.targets)
    if isinstance(node, removable | ast.Assign) and not binds:
        yield "removed", "pass"
    if isinstance(node, ast.Continue):
        yield "loop", "break"
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return", "return None"


def _binds_names(target: ast.expr) -> bool:
    """Tells targets without which a name would be unknown, which any test notices that comes there."""
    return isinstance(target, ast.Name) or (
        isinstance(target, ast.Tuple) and any(isinstance(each, ast.Name) for each in target.elts)
    )
