"""The random state of a process: python, numpy, torch on the CPU and on every CUDA device."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def capture(*, cuda: bool = True) -> dict[str, Any]:
    """Returns the state of every generator, without advancing any; of those on CUDA devices where they are asked for,
    which a forked process must not do."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.cuda.random.get_rng_state_all() if cuda and torch.cuda.is_available() else [],
    }


def seed(number: int) -> None:
    """Seeds every generator.

    Args:
        number: From 0 to below 2**32, which is as much as numpy takes.
    """
    random.seed(number)
    np.random.seed(number)
    # Not `torch.manual_seed`: without CUDA it notes the call and its stack each time, for when there will be CUDA.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


@contextlib.contextmanager
def undisturbed(*, cuda: bool = True) -> Iterator[None]:
    """Puts every generator back to where it was, whatever is drawn in between; see `capture`."""
    before = capture(cuda=cuda)
    try:
        yield
    finally:
        random.setstate(before["python"])
        np.random.set_state(before["numpy"])
        torch.random.set_rng_state(before["cpu"])
        if before["cuda"]:
            torch.cuda.random.set_rng_state_all(before["cuda"])
