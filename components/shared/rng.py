"""The random state of a process: python, numpy, torch on the CPU and on every CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Returns the state of every generator, without advancing any."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.cuda.random.get_rng_state_all() if torch.cuda.is_available() else [],
    }
