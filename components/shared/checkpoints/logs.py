"""What a trainer has logged up to a checkpoint, as `trainer_state.json` has it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.components.shared.core.document import load_object
from baton.components.shared.core.errors import DamagedError

FILE = "trainer_state.json"
"""File of a checkpoint."""
LogEntry = dict[str, float]
"""What a trainer logged at a step: names, `step` among them, and numbers."""


def parsed(data: bytes, where: str) -> list[LogEntry]:
    """Returns what was logged.

    Args:
        data: The file.
        where: Its address, for messages.

    Raises:
        DamagedError: it is not what a trainer writes.
    """
    history = load_object(data, where).get("log_history")
    if not isinstance(history, list) or not all(map(_is_entry, history)):
        raise DamagedError(f"{where} has no log_history of steps with numbers.")
    return history


def evaluation_losses(history: Iterable[LogEntry]) -> dict[int, float]:
    """Returns the evaluation losses that are numbers, by step."""
    losses = {int(entry["step"]): entry["eval_loss"] for entry in history if "eval_loss" in entry}
    return {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("step"), int)
