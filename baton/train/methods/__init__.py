"""Training methods, one file each, found by `training.method`; see the README in this folder."""

import contextlib
import importlib
from types import ModuleType
from typing import Any

from baton.models.train_rows import IGNORED
from baton.train.protocol import ChunkTrainer, all_counted

Row = dict[str, list[int]]


def load(method: str) -> ModuleType:
    """Returns a method's module, whose `build` takes a `Setup` and returns a trainer."""
    return importlib.import_module(f"{__name__}.{method}")


class TokenizedPairs(ChunkTrainer):
    """Mixin for `ORPOTrainer` and `CPOTrainer`: takes token ids of prompt, chosen and rejected, not text."""

    def tokenize_row(self, feature: Row, model: object = None) -> Row:
        # Answers end where `max_length` does.
        prompt = feature["prompt_ids"]
        row: Row = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for side in ("chosen", "rejected"):
            ids = (prompt + feature[f"{side}_ids"])[: self.max_length]
            row[f"{side}_input_ids"] = ids
            row[f"{side}_attention_mask"] = [1] * len(ids)
            row[f"{side}_labels"] = [IGNORED] * len(prompt) + ids[len(prompt) :]
        return row

    def concatenated_forward(self, model: Any, batch: Any) -> Any:
        # The likelihood is a mean over the tokens of all batches.
        *found, likelihood = super().concatenated_forward(model, batch)[:5]
        share = self.token_share(batch)
        return (*found, likelihood if share == 1.0 else likelihood * share)

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        # Upstream gathers a figure for each row, and would cut it in a pass's last step. Of several processes some may
        # have a row that only fills up there.
        alone = self.model.training and self.accelerator.num_processes == 1
        with all_counted(self.accelerator) if alone else contextlib.nullcontext():
            return super().compute_loss(*arguments, **options)


class AllCounted(ChunkTrainer):
    """For `DistillationTrainer`, also in the trainer of a user's script."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        # In training each process's figures count, also in a pass's last step.
        with all_counted(self.accelerator) if self.model.training else contextlib.nullcontext():
            return super().compute_loss(*arguments, **options)
