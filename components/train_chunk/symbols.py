"""What torch asks about numbers that may be symbols, answered for plain ones without loading what makes symbols.

It asks wherever it makes a tensor without memory, as all weights of a model are before they are read from its files.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

from baton.components.shared.core.deferring import Contents

MODULE = "torch.fx.experimental.symbolic_shapes"
Function = Callable[..., Any]


def _asking(name: str, is_plain: Callable[[Any], bool], answer: Function) -> Function:
    """Returns what stands for a question about numbers that may be symbols, and answers it for plain ones.

    Args:
        name: The question's function in `torch.fx.experimental.symbolic_shapes`.
        is_plain: Tells what the answer is known for.
        answer: What it is.
    """

    def ask(*values: Any) -> Any:
        if all(map(is_plain, values)):
            return answer(*values)
        package: Any = importlib.import_module(MODULE)
        assert package.ShapeEnv  # which nothing is told of: so it is loaded
        return getattr(package, name)(*values)

    return ask


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int)


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_number, value))


def _itself(value: Any) -> Any:
    return value


QUESTIONS: dict[str, tuple[Callable[[Any], bool], Function]] = {
    "expect_true": (_is_bool, _itself),
    "guard_or_false": (_is_bool, _itself),
    "guard_or_true": (_is_bool, _itself),
    "guard_size_oblivious": (_is_bool, _itself),
    "guarding_hint_or_throw": (_is_number, _itself),
    "has_guarding_hint": (_is_number, lambda _: True),
    "is_nested_int": (_is_number, lambda _: False),
    "statically_known_true": (_is_bool, _itself),
    "sym_and": (_is_bool, lambda *values: all(values)),
    "sym_eq": (_is_shape, operator.eq),
    "sym_or": (_is_bool, lambda *values: any(values)),
}
"""Of each function: what it can be told without symbols, and what it returns then."""
CONTENTS = Contents(values={name: _asking(name, *question) for name, question in QUESTIONS.items()})
