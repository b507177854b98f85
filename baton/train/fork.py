"""A fork's own settings, applied to its parent's state after that was restored and compared as saved.

`Trainer` restores optimizer and schedule with their saved settings, so a new recipe's learning rate would silently be
ignored. A fork applies its own settings once, before its first step; its checkpoints then contain them.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import torch
from pydantic import JsonValue
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

from baton.checkpoint.digest import tree_digest
from baton.checkpoint.store import CheckpointMeta

logger = logging.getLogger("baton")

OF_STEP = ("lr", "params")  # entries of a parameter group that are not settings


class ForkOverrides:
    """Settings in which a fork differs from its parent; `changed` has dotted path → value before and after."""

    def __init__(self, folder: str, changed: dict[str, list[JsonValue]]) -> None:
        self.changed = changed
        with open(os.path.join(folder, "trainer_state.json"), encoding="utf-8") as file:
            self._max_steps = json.load(file)["max_steps"]
        self._scheduler = torch.load(os.path.join(folder, "scheduler.pt"), weights_only=True)
        self._groups: list[dict[str, Any]] = []
        self._rates: list[float] = []

    @classmethod
    def of(cls, folder: str, meta: CheckpointMeta) -> ForkOverrides | None:
        """Returns the overrides for a checkpoint, None if the fork changes nothing."""
        origin = meta.forked_from
        return cls(folder, origin.changed) if origin and origin.changed else None

    def remember(self, trainer: Trainer) -> None:
        """Keeps optimizer's and schedule's settings from the fork's recipe, before the restore overwrites them."""
        groups = trainer.optimizer.param_groups
        self._groups = [{name: value for name, value in group.items() if name not in OF_STEP} for group in groups]
        if isinstance(trainer.lr_scheduler, LambdaLR):
            self._rates = [float(rate) for rate in trainer.lr_scheduler.base_lrs]

    def expected_digests(self, trainer: Trainer, skipped: tuple[int, ...] = ()) -> dict[str, str]:
        """Returns digests with the parent's values for what a fork decides: the run's length, the schedule's form."""
        now = trainer.state
        schedule = trainer.lr_scheduler.state_dict()
        if "lr_lambdas" in schedule:
            schedule = {**schedule, "lr_lambdas": self._scheduler.get("lr_lambdas")}
        return {
            "position": tree_digest([now.global_step, now.epoch, self._max_steps, *skipped]),
            "scheduler": tree_digest(schedule),
        }

    def apply(self, trainer: Trainer) -> None:
        groups, scheduler = trainer.optimizer.param_groups, trainer.lr_scheduler
        for group, own in zip(groups, self._groups, strict=True):
            group.update(own)
        if isinstance(scheduler, LambdaLR):
            scheduler.base_lrs = list(self._rates)
            at = zip(self._rates, scheduler.lr_lambdas, strict=True)
            rates = [rate * shape(scheduler.last_epoch) for rate, shape in at]
        else:  # the schedule lowers the rate by evaluations: keep what it has lowered so far
            before, after = self.changed.get("training.learning_rate", (1.0, 1.0))
            rates = [group["lr"] * after / before for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        # `get_last_lr` returns these, and `Trainer` logs them, until the schedule's next step.
        scheduler._last_lr = rates
        logger.info(
            "a fork takes over step %d with changed %s", trainer.state.global_step, ", ".join(sorted(self.changed))
        )
