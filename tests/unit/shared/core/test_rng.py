"""The random state is put back where it was."""

from __future__ import annotations

import random

import numpy as np
import torch

from baton.components.shared.core import rng


def test_random_numbers_go_on_where_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw(), draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draw()
    with rng.undisturbed():
        torch.manual_seed(99)
        draw()
    assert (first, draw()) == expected
