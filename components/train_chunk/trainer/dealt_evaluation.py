"""Evaluation with virtual workers: each batch is evaluated by one of the processes, and all have every result."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from transformers.trainer_pt_utils import nested_detach

from baton.components.shared.core import rng
from baton.components.train_chunk.trainer import passes
from baton.components.train_chunk.trainer.base import ChunkTrainer
from baton.components.train_chunk.trainer.passes import Record


class Dealt(ChunkTrainer):
    """Mixin for a `Trainer`: deals the batches of an evaluation in training to the processes, where those are told that
    each is alone."""

    _evaluated = 0
    _foreseen: list[Record] | None = None

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *rest: Any, **options: Any
    ) -> Any:
        """Evaluates the held-out rows."""
        self._evaluated = 0
        if self.recipe.parallel.virtual_workers and self.ranks.size > 1 and self.is_in_train:
            self._foreseen = self._evaluate_together(dataloader, bool(prediction_loss_only))
        try:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *rest, **options)
        finally:
            self._foreseen = None

    def prediction_step(self, *arguments: object, **options: object) -> object:
        """Evaluates a batch, unless some process has already."""
        if not self.recipe.parallel.virtual_workers:
            return super().prediction_step(*arguments, **options)
        number, self._evaluated = self._evaluated, self._evaluated + 1
        compute = functools.partial(super().prediction_step, *arguments, **options)
        made = self._foreseen[number] if self._foreseen else self._evaluated_batch(number, compute)
        passes.add(self, "eval", made)
        self.seed(f"evaluated:{number}")  # for metrics and callbacks: where the generators are, depends on who made it
        return made.outputs

    def seed(self, place: str) -> None:
        """Seeds all generators by the run's seed, the step and a place in it: the same in whichever process."""
        drawn = hashlib.sha256(f"{self.args.seed}:{self.state.global_step}:{place}".encode()).digest()
        rng.seed(int.from_bytes(drawn[:4], "big"))

    def _evaluate_together(self, dataloader: Any, prediction_loss_only: bool) -> list[Record]:
        """Returns what all batches come to, in their order."""
        self.model.eval()
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        size, number = self.ranks.size, -1
        ours = []
        for number, inputs in enumerate(dataloader):
            if number % size == self.ranks.rank:
                compute = functools.partial(super().prediction_step, self.model, inputs, prediction_loss_only)
                ours.append(self._evaluated_batch(number, compute))
        rows = self.ranks.gather(ours)
        return [rows[at % size][at // size] for at in range(number + 1)]

    def _evaluated_batch(self, number: int, compute: Callable[[], Any]) -> Record:
        self.seed(f"evaluation:{number}")
        made = passes.record(self, "eval", compute)
        made.outputs = nested_detach(made.outputs)
        return made
