"""Memory after a restore: the GPU holds before the first step what it holds between two steps of one run."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch

PAGED = 100_000
"""Numbers of a weight from which on bitsandbytes pages its state."""


@contextlib.contextmanager
def settled(optimizer: Any) -> Iterator[None]:
    """Has what is loaded lie where a fresh optimizer has it, and gives back what loading takes.

    Args:
        optimizer: It, or Accelerate's wrapper around it.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    pages = torch.cuda.is_available() and getattr(optimizer, "is_paged", False)
    if pages:  # on the GPU it might have no room
        optimizer.load_state_dict = functools.partial(optimizer.load_state_dict, move_to_device=False)
    try:
        yield
    finally:
        vars(optimizer).pop("load_state_dict", None)
    if pages:
        page(optimizer)
    gc.collect()
    if torch.cuda.is_available():
        # Files are read to the GPU where several processes train; what is left in its cache has other sizes than what a
        # step asks for.
        torch.cuda.empty_cache()


def page(optimizer: Any) -> None:
    """Pages what was loaded: bitsandbytes pages state that it makes, and not state that it loads."""
    functional = sys.modules["bitsandbytes"].functional
    for weight, values in optimizer.state.items():
        for name in {"state1", "state2"} & values.keys():
            value = values[name]
            if weight.numel() >= PAGED and not getattr(value, "is_paged", False):
                values[name] = functional.get_paged(*value.shape, dtype=value.dtype, device=weight.device).copy_(value)
                optimizer.page_mng.paged_tensors.append(values[name])
