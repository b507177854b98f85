"""Where a chunk of an attached trainer ends."""

from __future__ import annotations

import math

from baton.components.shared.core.errors import UserError

Target = int | float | str | tuple[int, int] | None
"""A step, a share of the run, or chunk k of n as `(k, n)` or `"k/n"`; None is the whole run."""

FORMS = "expected a step such as 100, a share such as 0.25, or chunk k of n as (k, n) or 'k/n'"


def resolve(target: Target, num_steps: int) -> tuple[int, int | None]:
    """Returns the step that a target means, and the chunk's number where the target has one.

    Args:
        target: What was asked for.
        num_steps: Steps of the whole run.

    Raises:
        UserError: it is no target of this run.
    """
    if target is None:
        return num_steps, None
    if isinstance(target, str | tuple | list):
        index, count = _pair(target)
        if not 1 <= index <= count <= num_steps:
            raise UserError(
                f"target {target!r} is chunk {index} of {count} in a run of {num_steps} steps; expected 1 ≤ k ≤ n ≤ "
                f"{num_steps}."
            )
        return -(-num_steps * index // count), index  # as `runs.plan` cuts a run
    if isinstance(target, bool) or not isinstance(target, int | float):
        raise UserError(f"target is {target!r}; {FORMS}.")
    if isinstance(target, float):
        if not 0 < target <= 1:
            raise UserError(f"target {target!r} is no share of a run; expected more than 0 and at most 1.0.")
        return math.ceil(num_steps * target), None
    if not 1 <= target <= num_steps:
        raise UserError(
            f"target is step {target}, and the run has {num_steps} steps; expected 1 to {num_steps}.",
            remedy="The trainer's max_steps or num_train_epochs say how long the run is, whatever its chunks.",
        )
    return target, None


def _pair(target: str | tuple[int, ...] | list[int]) -> tuple[int, int]:
    parts = target.split("/") if isinstance(target, str) else list(target)
    try:
        index, count = (int(part) for part in parts)
    except (ValueError, TypeError):
        raise UserError(f"target is {target!r}; {FORMS}.") from None
    return index, count
