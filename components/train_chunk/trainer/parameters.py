"""Groups of parameters with their own settings."""

from __future__ import annotations

import re
from typing import Any

import torch

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Group
from baton.components.train_chunk.trainer.base import ChunkTrainer

ParamGroup = dict[str, Any]
"""A parameter group of a torch optimizer: `params` and settings."""


class Grouped(ChunkTrainer):
    """Mixin for a `Trainer`: groups of parameters with their own learning rate, weight decay and clipping."""

    groups: tuple[Group, ...] = ()
    compile_optimizer = False
    _rates: dict[str, float] | None = None

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Returns `Trainer`'s optimizer with its parameter groups split."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if self.groups:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            optimizer.param_groups[:] = [
                part for group in optimizer.param_groups for part in _split(group, self.groups, names)
            ]
            present = {part.get("name") for part in optimizer.param_groups}
            for group in self.groups:
                if _name(group) not in present:
                    raise UserError(
                        f"training.groups: pattern {group.pattern!r} fits no trained parameter that an earlier group "
                        "left.",
                        remedy="Check it against the model's parameter names, and the order of groups.",
                    )
        if self.compile_optimizer:
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment, method-assign]
        return optimizer

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        """Clips all gradients together, as `Trainer` does, then those of each group that has its own norm."""
        norm = super()._clip_grad_norm(model)
        for group in self.groups:
            if group.max_grad_norm:
                parts = [x for x in self.optimizer.param_groups if x.get("name") == _name(group)]
                torch.nn.utils.clip_grad_norm_([p for x in parts for p in x["params"]], group.max_grad_norm)
        return norm

    def _get_learning_rate(self) -> float:
        """Returns the first group's learning rate, and keeps the others' of the same moment for the log."""
        groups = self.optimizer.param_groups
        self._rates = {f"learning_rate/{x['name']}": float(x["lr"]) for x in groups if "name" in x}
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs each group's learning rate beside the first one's."""
        if "learning_rate" in logs:
            logs |= self._rates or {}
        super().log(logs, start_time)


def _name(group: Group) -> str:
    return group.name or group.pattern


def _split(whole: ParamGroup, groups: tuple[Group, ...], names: dict[int, str]) -> list[ParamGroup]:
    """Returns a parameter group of the optimizer as the recipe's groups cut it, without empty ones."""
    settings = {key: value for key, value in whole.items() if key != "params"}
    parts: list[list[torch.nn.Parameter]] = [[] for _ in (*groups, None)]
    for parameter in whole["params"]:
        at = next((i for i, x in enumerate(groups) if re.search(x.pattern, names[id(parameter)])), len(groups))
        parts[at].append(parameter)
    result = []
    for group, parameters in zip(groups, parts, strict=False):
        own: ParamGroup = {"name": _name(group)}
        if group.learning_rate is not None:
            own["lr"] = group.learning_rate
        if group.weight_decay is not None:
            own["weight_decay"] = group.weight_decay
        result.append({**settings, **own, "params": parameters})
    return [part for part in [{**settings, "params": parts[-1]}, *result] if part["params"]]
