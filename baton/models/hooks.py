"""The user's own code: found by import path, and kept exact across chunks."""

from __future__ import annotations

import functools
import hashlib
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from baton.errors import UserError, in_words, own_packages, place_of
from baton.models import rng
from baton.recipe.run import Hook, Hooks


def find(path: str) -> Any:
    """Returns the object of an import path `module:object`."""
    module, _, name = path.partition(":")
    own_packages.add(module.partition(".")[0])
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise UserError(
            f"hook {path!r} cannot be imported: {error}.",
            remedy="Give the file in hooks.source, or install the module in the image.",
        ) from None
    except AttributeError as error:
        raise UserError(f"hook {path!r} does not exist: {error}.", remedy="Check the name after the colon.") from None
    except Exception as error:
        raise UserError(f"hook {path!r} cannot be imported: {in_words(error)}.") from None


def callbacks(hooks: Hooks) -> list[Any]:
    """Returns the user's callbacks."""
    return [_call(hook) for hook in hooks.callbacks]


def collator(hooks: Hooks, tokenizer: Any, seed: int) -> Any | None:
    """Returns the user's collator, seeded for each batch."""
    return SeededCollator(_call(hooks.collator, tokenizer=tokenizer), seed) if hooks.collator else None


def loss(hooks: Hooks) -> Callable[..., Any] | None:
    """Returns the user's loss."""
    return functools.partial(find(hooks.loss.use), **hooks.loss.options) if hooks.loss else None


def metrics(hooks: Hooks) -> Callable[[Any], dict[str, float]] | None:
    """Returns one function for all of the user's metrics."""
    if not hooks.metrics:
        return None
    functions = [functools.partial(find(hook.use), **hook.options) for hook in hooks.metrics]
    return lambda prediction: {name: value for metric in functions for name, value in metric(prediction).items()}


class SeededCollator:
    """Calls a collator with all generators seeded from the epoch and the rows, and puts them back.

    Its draws are then the same in whichever process and worker a batch is made, and the model's own draws do not depend
    on the number of batches made before.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], seed: int) -> None:
        self.collator = collator
        self.seed = seed
        self.epoch = 0

    def __call__(self, rows: list[Any]) -> Any:
        drawn = hashlib.sha256(f"{self.seed}:{self.epoch}:{rows!r}".encode()).digest()
        with seeded(int.from_bytes(drawn[:4], "big")):
            return self.collator(rows)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of the CPU for a block, and puts them back."""
    with rng.undisturbed(cuda=False):  # a data loader's worker is forked
        random.seed(seed)
        np.random.seed(seed)
        torch.random.default_generator.manual_seed(seed)
        yield


def _call(hook: Hook, **arguments: Any) -> Any:
    try:
        return find(hook.use)(**arguments, **hook.options)
    except TypeError as error:
        if place_of(error):  # raised by its own code
            raise
        raise UserError(f"hook {hook.use!r} does not take these options: {error}.") from None
