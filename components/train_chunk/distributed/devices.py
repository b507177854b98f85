"""One process sees one device."""

from __future__ import annotations

import os

from baton.components.shared.recipe import Recipe
from baton.components.train_chunk.distributed.ranks import Ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the devices that CUDA enumerates, all of them where it is unset."""


def pin(recipe: Recipe, ranks: Ranks) -> None:
    """Hides all GPUs but the first from a process that trains alone, before anything has asked CUDA for them.

    With several visible ones `Trainer` wraps the model in DataParallel, and trains as many times the rows per step as
    the recipe says. Ranks that torch's launcher started choose theirs by their local rank, and must see all.
    """
    if ranks.launched or recipe.resources.gpus == 0:
        return
    first = os.environ.get(VISIBLE, "0").partition(",")[0].strip()
    os.environ[VISIBLE] = first  # an empty one hides all, and stays
