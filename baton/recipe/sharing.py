"""Trials that may train inside one process: equal in all that a process does once.

A process imports, patches and loads for all its trials. Settings of the trainer alone may differ. Any other setting
separates two trials, also a new one, until somebody decides that a process keeps nothing of it.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from baton.documents import Json
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.run import code_in

# Settings of `training` that change the trainer's own objects alone, as those of the method do.
FREE = (
    *("batch_size", "micro_batch_size", "epochs", "max_steps", "learning_rate", "lr_scheduler", "lr_scheduler_options"),
    *("warmup_steps", "weight_decay", "max_grad_norm", "groups", "adam_betas", "adam_epsilon", "optimizer_options"),
    *("neftune_alpha", "gradient_checkpointing", "early_stopping", "guard", "log_every"),
)


class Sharing(NamedTuple):
    """Trials by process, the trials that each need a process for every chunk, and why, in words."""

    groups: list[list[str]]
    apart: list[str]
    reasons: list[str]


def share(recipes: Mapping[str, Recipe]) -> Sharing:
    """Returns which trials, given with their recipes, take turns in one process."""
    groups: dict[str, list[str]] = {}
    apart, reasons = [], []
    for trial, recipe in recipes.items():
        if reason := needs_own_process(recipe):
            apart.append(trial)
            reasons.append(f"{trial} trains each chunk in a process of its own: {reason}")
        else:
            groups.setdefault(json.dumps(_common(recipe), sort_keys=True), []).append(trial)
    first, *others = groups or [""]
    for other in others:
        changed = "; ".join(load.changed_paths(json.loads(first), json.loads(other)))
        reasons.append(f"another process than {groups[first][0]}'s trains {', '.join(groups[other])}: {changed}")
    return Sharing(list(groups.values()), apart, reasons)


def needs_own_process(recipe: Recipe) -> str | None:
    """Returns why each chunk of a trial is a process of its own, None where it may share one."""
    training = recipe.training
    if code := code_in(recipe.model_dump(mode="json")):
        return f"{code[0]} is code, which may keep state"
    reasons = {
        "training.parallel needs several": recipe.world_size > 1 or recipe.parallel.virtual_workers,
        "training.compile keeps compiled code": training.compile or training.compile_optimizer,
        "training.liger replaces functions": training.liger,
        "training.micro_batch_size auto measures memory": training.micro_batch_size == "auto",
        "bitsandbytes keeps settings by weight": recipe.uses_bitsandbytes,
        "tracking.prometheus_port is free at a process's end": recipe.tracking.prometheus_port is not None,
    }
    return next((reason for reason, is_set in reasons.items() if is_set), None)


def _common(recipe: Recipe) -> Json:
    """Returns the settings that are equal in a process."""
    document = recipe.model_dump(mode="json")
    training = {
        name: document["training"][name] for name in document["training"].keys() - {*FREE, recipe.training.method}
    }
    weights = "all" if recipe.adapter is None else "adapter"
    return {"model": document["model"], "data": document["data"], "training": training, "weights": weights}
