"""Which rows a step trains on: positions in the order of its pass, which is a function of seed, pass and step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from baton.components.shared.recipe import Recipe

LAYERS = ("batch_sampler", "batches", "sampler")
"""Attributes by which batches know what they are made from."""


def of_step(loader: Any, recipe: Recipe, steps_per_epoch: int, step: int) -> list[int]:
    """Returns the numbers of a step's rows; where the model writes, of all prompts of the round that it trains on.

    Args:
        loader: The trainer's batches, which are gone through no more.
        recipe: The resolved recipe.
        steps_per_epoch: Steps of a pass over the rows.
        step: The step, from 1.
    """
    training = recipe.training
    # TRL's order has a round's prompts, each as often as it is answered, once for every pass.
    size = training.round_size * recipe.gradient_accumulation_steps if training.spec.generates else training.batch_size
    epoch, index = divmod(step - 1, steps_per_epoch)
    order = _order(loader)
    if hasattr(order, "set_epoch"):
        order.set_epoch(epoch)
    rows: Iterator[int] = islice(iter(order), index * size, (index + 1) * size)
    return list(dict.fromkeys(int(row) for row in rows))


def _order(loader: Any) -> Any:
    """Returns the order of rows inside all that makes batches of it."""
    inner = loader.batch_sampler
    while (layer := next((name for name in LAYERS if hasattr(inner, name)), None)) is not None:
        inner = getattr(inner, layer)
    return inner
