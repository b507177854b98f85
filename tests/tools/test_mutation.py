"""What the mutator changes, and what it leaves alone."""

from __future__ import annotations

import ast
import importlib.util
from textwrap import dedent

from tools.mutation import choosing, operators
from tools.mutation.equivalent import EQUIVALENT
from tools.mutation.forks import module_of


def changed(source: str) -> set[str]:
    """Returns what the mutants of a few lines look like, each on the line that it changes."""
    data = dedent(source).strip().encode()
    found = set()
    for mutant in operators.mutants("m.py", data):
        before, after = data.decode().splitlines(), mutant.apply(data).decode().splitlines()
        ast.parse(mutant.apply(data))
        found.add(next((line for line, old in zip(after, before, strict=False) if line != old), "").strip())
    return found


def test_conditions_and_comparisons() -> None:
    assert changed("if a < b:\n    c()") == {"if True:", "if False:", "if a <= b:", "if a >= b:", "pass"}
    assert changed("x = a is not None") == {"x = a is None"}
    assert changed("x = a not in b") == {"x = a in b"}
    assert changed("x = not a") == {"x = (a)"}
    assert changed("x = (a and\n     b)") == {"x = (a or", "x = ((a))", "x = ((b))"}


def test_what_lies_between_is_found_past_comments_and_names() -> None:
    assert "or c" in " ".join(changed("x = (a  # this and that\n     and c)"))
    assert changed("x = is_a is b") == {"x = is_a is not b"}
    assert changed("x = 'ä' + b - c") == {"x = 'ä' - b - c", "x = 'ä' + b + c", "x = 'ä-' + b - c"}


def test_constants_calls_and_statements() -> None:
    assert changed("x = f(1, b)") == {"x = f(2, b)", "x = f(b, 1)"}
    assert changed("x = f(a, key=b)") == {"x = f(a)"}
    assert changed("x = max(a, b)") == {"x = min(a, b)"}
    assert changed("x.y = 1") == {"pass", "x.y = 2"}
    assert changed("x += y") == {"pass"}
    assert changed("def f():\n    return a") == {"return None"}
    assert changed("for a in b:\n    continue") == {"break", "pass"}
    assert changed("x = max(a) if b else -c") == {
        "x = min(a) if b else -c",
        "x = max(a) if True else -c",
        "x = max(a) if False else -c",
        "x = max(a) if b else c",
    }
    assert changed("try:\n    f()\nexcept KeyError:\n    g()\nfinally:\n    h()") == {"pass", "raise"}
    assert changed("with a.b():\n    f()") == {"if True:", "pass"}


def test_what_only_says_something_is_left_alone() -> None:
    idle = '''
    """A module."""
    import a
    from b import c
    logger = logging.getLogger("baton")
    x: int
    if TYPE_CHECKING:
        import d
    def f(a: "text" = b) -> "text":
        """Says 1."""
        logger.info("said %d", a)
        assert a > 1
    '''
    assert changed(idle) == set()
    assert changed("raise ValueError(f'{a} is {1}')") == {"pass"}
    assert changed("x = open(a, encoding='utf-8')") == set()


def test_a_draw_stays_where_code_beside_it_changes() -> None:
    source = b"def f(a):\n    return a + 1\n\n\ndef g(a):\n    return a < 2\n"
    mutants = operators.mutants("m.py", source)
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    before = [mutant.key for mutant in choosing.drawn(mutants, 100, 1)]
    after = [mutant.key for mutant in choosing.drawn(operators.mutants("m.py", b"import x\n" + source), 100, 1)]
    assert before == after
    assert before != [mutant.key for mutant in choosing.drawn(mutants, 100, 2)]
    drawn = choosing.drawn([*mutants, *operators.mutants("n.py", source)], 6, 1)
    assert [mutant.path for mutant in drawn] == ["m.py"] * 3 + ["n.py"] * 3


def test_a_mutant_takes_the_place_of_its_module() -> None:
    modules = {path: importlib.util.find_spec(module_of(path)) for path in choosing.FILES}
    assert {path: spec and spec.origin for path, spec in modules.items()} == {
        path: str(choosing.ROOT / path) for path in choosing.FILES
    }


def test_what_is_listed_as_equivalent_is_a_mutant() -> None:
    assert EQUIVALENT.keys() <= {mutant.key for mutant in choosing.all_mutants()}
