"""Drawing tokens so that what one prompt gets does not depend on the prompts beside it."""

from __future__ import annotations

import hashlib

import torch


class GumbelNoise:
    """Adds Gumbel noise to scores: the highest is then a draw from their softmax (Maddison et al., arXiv:1411.0030).

    Each row has its own generator, on the CPU, so that its noise is the same in any batch and on any device.

    Args:
        seeds: What decides the noise of each row of the batch.
    """

    def __init__(self, seeds: list[tuple[int, int]]) -> None:
        self._generators = [torch.Generator().manual_seed(_number(seed)) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores of shape (rows, vocabulary) with noise; -inf stays what it is."""
        waits = torch.stack([torch.rand(scores.shape[-1], generator=each) for each in self._generators])
        waits = -torch.log(waits.clamp_(torch.finfo(torch.float32).tiny))
        noise = -torch.log(waits.clamp_(torch.finfo(torch.float32).tiny))
        return scores.float() + noise.to(scores.device)


def _number(seed: tuple[int, int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:8], "big") >> 1
