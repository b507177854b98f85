"""One process sees one device."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator

from baton.components.shared.core.errors import BatonError, BrokenError
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk.distributed.ranks import Ranks

logger = logging.getLogger("baton")

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the devices that CUDA enumerates, all of them where it is unset."""
LINK = r"NCCL|gloo/transport|connectFullMesh|DistNetworkError|DistStoreError"
BROKEN = re.compile(rf"CUDA error|CUDA driver error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|device-side assert|{LINK}")
"""What torch says where a device or the link to another process is broken, which its process cannot mend."""


def is_broken(message: str) -> bool:
    """Returns whether an error is a device's, which a fresh process may find in order.

    Memory that is too small stays too small, and is a CUDA error, too.
    """
    return bool(BROKEN.search(message)) and "out of memory" not in message


@contextlib.contextmanager
def watched(step: Callable[[], int]) -> Iterator[None]:
    """Says of a device that breaks after which step it did.

    The link to another device is none: no state that is trained can break it.

    Args:
        step: Returns the step that training has come to.

    Raises:
        BrokenError: in the place of the error.
    """
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, BatonError) or not is_broken(text) or re.search(LINK, text):
            raise
        logger.exception("a device broke")
        raise BrokenError(f"{text} It came after step {step()}.") from None


def pin(recipe: Recipe, ranks: Ranks) -> None:
    """Hides all GPUs but its own from a process that trains alone, before anything has asked CUDA for them.

    With several visible ones `Trainer` wraps the model in DataParallel, and trains as many times the rows per step as
    the recipe says. Ranks that torch's launcher started choose theirs by their local rank, and must see all, but for
    those with virtual workers, each of which trains as if it were alone.
    """
    if (ranks.launched and not recipe.parallel.virtual_workers) or recipe.resources.gpus == 0:
        return
    visible = os.environ.get(VISIBLE, ",".join(map(str, range(ranks.local_rank + 1)))).split(",")
    os.environ[VISIBLE] = visible[ranks.local_rank % len(visible)].strip()  # an empty one hides all, and stays
