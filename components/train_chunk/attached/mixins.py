"""The classes by which a trainer of somebody else's becomes one that trains in chunks, for as long as a chunk lasts."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from baton.components.train_chunk.attached import orders
from baton.components.train_chunk.attached.orders import Seeded
from baton.components.train_chunk.methods.distillation import Counted
from baton.components.train_chunk.trainer.base import StateDict
from baton.components.train_chunk.trainer.chunked import Chunked
from baton.components.train_chunk.trainer.generating import Completing
from baton.components.train_chunk.trainer.references import MovingReference
from baton.components.train_chunk.trainer.resumable import Resumable
from baton.components.train_chunk.trainer.turns import InTurns

BUFFERS = {"step": "_step", "completions": "_buffered_inputs"}
"""What trainers whose model generates keep between steps: name in a checkpoint → attribute."""


class Attached(Chunked):
    """Mixin for a `Trainer` that was built without Baton: what `Chunked` does, and nothing that only a recipe asks for.

    Attributes:
        drawing: What draws random numbers for rows, and must be told the epoch.
    """

    drawing: tuple[Seeded, ...] = ()
    _writing = False

    def _get_train_sampler(self, *arguments: Any, **options: Any) -> Any:
        sampler = super()._get_train_sampler(*arguments, **options)
        seedable = bool(getattr(self.accelerator, "use_seedable_sampler", True))
        return orders.exact(sampler, self.args.seed, seedable=seedable)

    def _get_dataloader(self, dataset: Any, *arguments: Any, **options: Any) -> DataLoader[Any]:
        if options.get("is_training") and not isinstance(dataset, torch.utils.data.IterableDataset):
            dataset, drawn = orders.seeded_rows(dataset, self.args.seed)
            self.drawing = (drawn,) if drawn else ()
        return super()._get_dataloader(dataset, *arguments, **options)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Notes the best step; `Trainer` does so only where it says itself when to save."""
        is_best: bool = super()._determine_best_metric(metrics, trial)
        if is_best:
            self.state.best_global_step = self.state.global_step
        return is_best

    def _write_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        self._writing = True
        try:
            super()._write_checkpoint(model, trial)
        finally:
            self._writing = False

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Writes none to a checkpoint, and elsewhere what TRL writes."""
        if not self._writing:
            super(Resumable, self).create_model_card(*arguments, **options)

    def _prepare_dataset(self, *arguments: Any, **options: Any) -> Any:
        """Prepares rows as TRL does: here no stage has done it before."""
        return super(Resumable, self)._prepare_dataset(*arguments, **options)


class Writing(Completing, Attached):
    """Mixin for trainers whose model generates."""

    def method_state(self) -> StateDict:
        """Returns what is still to be trained on, and the place in the cycle."""
        return {**super().method_state(), **{name: getattr(self, attribute) for name, attribute in BUFFERS.items()}}

    def load_method_state(self, saved: StateDict) -> None:
        """Restores them."""
        super().load_method_state(saved)
        for name, attribute in BUFFERS.items():
            setattr(self, attribute, saved[name])

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Tokenizes as TRL does: a column `tools` means nothing to it."""
        return super(InTurns, self)._tokenize_prompts(prompts)


def exact_class(trainer: Trainer) -> type[Trainer]:
    """Returns the class by which a trainer trains in chunks: its own, with mixins in front."""
    kind = type(trainer)
    names = {base.__name__ for base in kind.__mro__}
    mixins: list[type] = [Writing if hasattr(trainer, "_buffered_inputs") else Attached]
    if "DistillationTrainer" in names:
        mixins.insert(0, Counted)
    if getattr(trainer.args, "sync_ref_model", False):
        mixins.insert(0, MovingReference)
    return type(kind.__name__, (*mixins, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
