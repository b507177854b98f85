"""Tokenized pairs for those of TRL's trainers that take text."""

from __future__ import annotations

from typing import Any

from components.shared.labels import IGNORED


class Tokenized:
    """Mixin for `ORPOTrainer` and `CPOTrainer`: takes rows of `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        """Returns the columns that the trainer's collator pads; answers end where `max_length` does."""
        trainer: Any = self
        prompt = feature["prompt_ids"]
        row: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for side in ("chosen", "rejected"):
            ids = (prompt + feature[f"{side}_ids"])[: trainer.max_length]
            row[f"{side}_input_ids"] = ids
            row[f"{side}_attention_mask"] = [1] * len(ids)
            row[f"{side}_labels"] = [IGNORED] * len(prompt) + ids[len(prompt) :]
        return row
