"""How many numbers a model has, wherever they are and however they are packed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def count(parameters: Iterable[torch.Tensor]) -> int:
    """Returns how many numbers parameters have before they are packed or split over processes."""
    return sum(map(_count, parameters))


def _count(value: torch.Tensor) -> int:
    packed = getattr(value, "quant_state", None)  # bitsandbytes' of 4 bits, two to a byte
    if packed is not None:
        return math.prod(packed.shape)
    whole = getattr(value, "ds_numel", None)  # ZeRO's stage 3 leaves an empty tensor in its place
    return value.numel() if whole is None else int(whole)
