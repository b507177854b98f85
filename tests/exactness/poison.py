"""A row that spoils its step: what an overflow in a kernel, or a row that is broken, does to a loss."""

from __future__ import annotations

from typing import Any

POISON = "~"
"""What a row has that no other has."""


class Poisoned:
    """Has the loss of a batch with a poisoned row be no number."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *arguments, **options)  # type: ignore[misc]
        token = self.processing_class.convert_tokens_to_ids(POISON)  # type: ignore[attr-defined]
        if not model.training or not (inputs["input_ids"] == token).any():
            return loss
        return loss * float("nan")
