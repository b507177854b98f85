"""A run's parameters in MLflow: what its recipe sets, and what follows from that.

Names are the recipe's own dotted paths, so that one run's page can be compared with another's. A setting that is left
at its default is none, but for those that every table of runs has. What depends on the place alone, where things lie
and what pods ask for, is in the resolved recipe among the artifacts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import Tokens
from baton.components.shared.runs.plan import Plan

ELSEWHERE = frozenset({"name", "phases", "resources", "retrain", "store", "sweep", "tracking"})
"""Sections that say nothing of what is trained."""
KIND = ("profile", "gpus", "nodes")
"""What of `resources` does."""
ALWAYS = ("seed", "training.method", "training.batch_size", "training.learning_rate")
"""What each run has, default or not."""
LONGEST = 500
"""Letters of a value."""
FORBIDDEN = re.compile(r"[^\w\-. /:]")
"""What a name in MLflow may not hold."""

Parameters = dict[str, str]


def chosen(recipe: Recipe) -> Parameters:
    """Returns what a recipe sets, with its `--set` and what its profile chose; what a chunk finds out is left out."""
    written: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    resources = written.get("resources", {})
    document = {name: value for name, value in written.items() if name not in ELSEWHERE}
    document["resources"] = {name: resources[name] for name in KIND if name in resources}
    whole = dict(_flat(recipe.model_dump(mode="json", include={"seed", "training"})))
    values = dict(_flat(document)) | {name: whole[name] for name in ALWAYS}
    # These are found by the first chunk, and a parameter cannot be changed.
    if recipe.training.lr_find:
        del values["training.learning_rate"]
    if recipe.training.micro_batch_size == "auto":
        del values["training.micro_batch_size"]
    return _texts(values)


def resolved(
    recipe: Recipe, plan: Plan, tokens: Tokens, *, world_size: int, parameters: int, trainable: int
) -> Parameters:
    """Returns what a chunk has found out.

    Args:
        recipe: The run's recipe, resolved.
        plan: Its plan.
        tokens: Its tokenized rows.
        world_size: Processes that train together.
        parameters: Parameters of the model.
        trainable: Those that training changes.
    """
    return _texts(
        {
            "training.learning_rate": recipe.training.learning_rate,
            "training.micro_batch_size": recipe.micro_batch_size_per_process,
            "training.gradient_accumulation_steps": recipe.gradient_accumulation_steps,
            "parallel.world_size": world_size,
            "plan.steps": plan.num_steps,
            "plan.steps_per_epoch": plan.steps_per_epoch,
            "plan.targets": ", ".join(map(str, plan.targets)),
            "plan.rows": plan.rows,
            "data.tokens": tokens.tokens,
            "model.parameters": parameters,
            "model.trainable_parameters": trainable,
        }
    )


def of_section(name: str, document: Mapping[str, Any]) -> Parameters:
    """Returns what a section sets."""
    return _texts(dict(_flat(dict(document), name)))


def _texts(values: Mapping[str, Any]) -> Parameters:
    # None is no value, and an empty section sets nothing.
    return {
        FORBIDDEN.sub("_", name): _text(value)[:LONGEST]
        for name, value in values.items()
        if value is not None and value != {}
    }


def _text(value: Any) -> str:
    if isinstance(value, list) and not any(isinstance(entry, list | dict) for entry in value):
        return ", ".join(map(str, value))
    return str(value)


def _flat(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        name = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _flat(value, name)
        else:
            yield name, value
