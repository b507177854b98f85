"""Mixin by which one process restores what several have written, each its part of the state."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import torch

from baton.components.shared.checkpoints import sharded
from baton.components.shared.core.errors import UserError
from baton.components.train_chunk.trainer.base import ChunkTrainer, StateDict
from baton.components.train_chunk.trainer.partitions import MASTER, Piece, Saved, sizes

if TYPE_CHECKING:
    from torch import nn


class Joined(ChunkTrainer):
    """Mixin for a `Trainer`: puts together what a checkpoint has in parts, where it trains alone."""

    @property
    def joins(self) -> bool:
        """Whether the checkpoint is in parts, and this process has none beside it."""
        return self.args.world_size == 1 and self.resumption.strategy != "ddp" and self.resumption.is_reshaped

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (self.joins and sharded.is_sharded(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        types = {entry.properties.dtype for entry in sharded.tensors(resume_from_checkpoint).values()}
        for weight in self.model.parameters():
            if weight.requires_grad:
                _require_type(weight, types)
        scratch = os.path.join(self.args.output_dir, "joined")
        try:
            super()._load_from_checkpoint(sharded.as_whole(resume_from_checkpoint, scratch), model)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.joins:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        schedule = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
        if sharded.is_sharded(checkpoint):
            self._join_shards(os.path.join(checkpoint, sharded.OPTIMIZER))
        else:
            self._join_partitions(checkpoint)
            schedule = with_all(schedule, self.optimizer.param_groups)
        self.lr_scheduler.load_state_dict(schedule)

    def _join_shards(self, folder: str) -> None:
        """Restores the optimizer from FSDP's shards, as Accelerate does in several processes."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        optimizer = self.bare_optimizer()
        state = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        sharded.fill(folder, state)
        set_optimizer_state_dict(self.model, optimizer, state["optimizer"])

    def _join_partitions(self, checkpoint: str) -> None:
        """Restores weights, from their masters, and optimizer from ZeRO's partitions."""
        groups = self.trained()
        saved = Saved(checkpoint, self.resumption.ranks, sizes(groups))
        state = {}
        for number, weight in enumerate(itertools.chain.from_iterable(groups)):
            pieces = [Piece(number, 0, weight.numel())]
            master = saved.row(MASTER, pieces)
            _require_type(weight, {master.dtype})
            weight.data.copy_(master.view_as(weight))
            entries = saved.state(pieces).items()
            state[number] = {kind: value.view_as(weight) if _is_row(value) else value for kind, value in entries}
        settings = iter(saved.settings)  # DeepSpeed has left out groups without weights
        own = self.optimizer.state_dict()["param_groups"]
        merged = [{**next(settings), "params": group["params"]} if group["params"] else group for group in own]
        self.optimizer.load_state_dict({"state": state, "param_groups": merged})


def with_weights(schedule: StateDict, groups: Sequence[StateDict]) -> StateDict:
    """Returns a schedule's state without the groups that have no weights, which DeepSpeed leaves out."""
    return {
        name: [each for each, group in zip(value, groups, strict=True) if group["params"]]
        if isinstance(value, list) and len(value) == len(groups)
        else value
        for name, value in schedule.items()
    }


def with_all(schedule: StateDict, groups: Sequence[StateDict]) -> StateDict:
    """Returns a schedule's state with such groups among the others; they get what the first one has."""
    held = [group for group in groups if group["params"]]
    full = {}
    for name, value in schedule.items():
        if isinstance(value, list) and len(value) == len(held):
            left = iter(value)
            full[name] = [next(left) if group["params"] else value[0] for group in groups]
        else:
            full[name] = value
    return full


def _require_type(weight: torch.Tensor, types: Set[torch.dtype]) -> None:
    """Checks that a weight is held in a type that weights were saved in.

    Raises:
        UserError: it would be rounded.
    """
    if weight.dtype not in types:
        held, *saved = (str(each).removeprefix("torch.") for each in (weight.dtype, *types))
        raise UserError(
            f"the checkpoint's weights are in {' and '.join(sorted(saved))}, and one process would hold them in "
            f"{held}, as model.dtype says.",
            remedy="Train on in several processes, or fork the run's exported model.",
        )


def _is_row(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1
