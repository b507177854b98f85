"""Where a chunk ends, in the ways in which it can be said."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.train import attach


@pytest.mark.parametrize(
    ("target", "step", "number"),
    [(None, 10, None), (3, 3, None), (0.25, 3, None), (1.0, 10, None), ((1, 3), 4, 1), ("3/3", 10, 3), ([2, 3], 7, 2)],
)
def test_a_target_is_a_step_a_share_or_one_of_several_chunks(target: Any, step: int, number: int | None) -> None:
    assert attach.resolve_target(target, 10) == (step, number)


@pytest.mark.parametrize("target", [0, 11, 0.0, 1.5, True, "half", "0/4", "5/4", (1, 11), (1, 2, 3), {}])
def test_anything_else_is_refused_with_its_value(target: Any) -> None:
    with pytest.raises(UserError, match="target"):
        attach.resolve_target(target, 10)
