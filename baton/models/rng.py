"""Random state of a process, captured, seeded and restored, and draws of tokens by prompt."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def capture(*, cuda: bool = True) -> dict[str, Any]:
    """Returns every generator's state without advancing any; a forked process must leave `cuda` out."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.cuda.random.get_rng_state_all() if cuda and torch.cuda.is_available() else [],
    }


def restore(state: Mapping[str, Any]) -> None:
    """Puts every generator back to a captured state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.random.set_rng_state_all(state["cuda"])


def seed(number: int) -> None:
    """Seeds every generator with a number below 2**32, numpy's limit."""
    random.seed(number)
    np.random.seed(number)
    # Not `torch.manual_seed`: without CUDA it notes the call and its stack each time, for when there will be CUDA.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


@contextlib.contextmanager
def undisturbed(*, cuda: bool = True) -> Iterator[None]:
    """Puts every generator back after a block; see `capture`."""
    before = capture(cuda=cuda)
    try:
        yield
    finally:
        restore(before)


class GumbelNoise:
    """Adds Gumbel noise to scores: the highest is then a draw from their softmax (Maddison et al., arXiv:1411.0030).

    Each row has its own generator, seeded by its entry of `seeds` and on the CPU. So a prompt's tokens depend neither
    on its neighbours nor on the device.
    """

    def __init__(self, seeds: list[tuple[int, int]]) -> None:
        digests = (hashlib.sha256(repr(seed).encode()).digest() for seed in seeds)
        self._generators = [torch.Generator().manual_seed(int.from_bytes(x[:8], "big") >> 1) for x in digests]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores of shape (rows, vocabulary) with noise; -inf stays."""
        waits = torch.stack([torch.rand(scores.shape[-1], generator=each) for each in self._generators])
        waits = -torch.log(waits.clamp_(torch.finfo(torch.float32).tiny))
        noise = -torch.log(waits.clamp_(torch.finfo(torch.float32).tiny))
        return scores.float() + noise.to(scores.device)
