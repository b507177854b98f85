"""What is answered without symbols is what torch answers."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from torch.fx.experimental import symbolic_shapes

from baton.train import imports

VALUES: list[Any] = [True, False, 0, 1, 7, (), (1, 2), (2, 1), (1, 2, 3)]
TWO = {"sym_and", "sym_or", "sym_eq"}
LATER = """
from baton.train import lazy_imports as deferring
from baton.train import imports
deferring.defer(imports.UNTRACED)
from torch.fx.experimental.symbolic_shapes import expect_true, guard_or_false
import torch
assert expect_true(True) and torch.empty(2, 3, device="meta").normal_().shape == (2, 3)
assert deferring.is_waiting(imports.SYMBOLS) and deferring.is_waiting("sympy"), "nothing has asked for symbols"
try:
    guard_or_false(1.5)
except AssertionError as error:
    assert "Expected bool" in str(error), error
assert not deferring.is_waiting(imports.SYMBOLS) and not deferring.is_waiting("sympy")
seen = []
def twice(x):
    if guard_or_false(x.shape[0] == 4):
        return x
    return 2 * x
run = torch.compile(twice, backend="eager", dynamic=True)
assert run(torch.ones(3)).sum() == 6 and run(torch.ones(4)).sum() == 4, "a symbol is torch's to answer for"
"""


@pytest.mark.parametrize("name", imports.SYMBOL_QUESTIONS)
def test_plain_numbers_are_answered_as_torch_does(name: str) -> None:
    is_plain, answer = imports.SYMBOL_QUESTIONS[name]
    asked = 0
    for values in itertools.product(VALUES, repeat=2 if name in TWO else 1):
        if all(map(is_plain, values)):
            asked += 1
            theirs = getattr(symbolic_shapes, name)(*values)
            assert (answer(*values), type(answer(*values))) == (theirs, type(theirs)), values
    assert asked >= 2


@pytest.mark.slow
def test_other_values_are_asked_of_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
