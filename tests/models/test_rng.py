"""The random state is put back where it was."""

from __future__ import annotations

import random

import numpy as np
import torch

from baton.models import rng


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


def test_seeding_seeds_all_and_leaves_no_call_for_later() -> None:
    later = len(torch.cuda._queued_calls)
    rng.seed(7)
    assert len(torch.cuda._queued_calls) == later or torch.cuda.is_available()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))
