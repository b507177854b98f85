"""Router losses, against values worked out by hand, and in a trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baton.train import build

EVEN = torch.zeros(4, 4)
"""Four tokens, four experts, no preference."""
ONE = torch.tensor([[100.0, 0.0, 0.0, 0.0]] * 4)
"""Every token is sent to the first expert, for certain."""
HALVES = torch.log(torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.6, 0.4], [0.1, 0.9]]))
"""Two experts: f = (3/4, 1/4), P = (0.475, 0.525)."""


def test_balance_by_hand() -> None:
    assert build.balance(ONE, 1).item() == pytest.approx(4.0)  # C · 1 · 1
    assert build.balance(HALVES, 1).item() == pytest.approx(2 * (0.75 * 0.475 + 0.25 * 0.525))
    assert build.balance(HALVES, 2).item() == pytest.approx(2 * (0.5 * 0.475 + 0.5 * 0.525))
    assert build.balance(EVEN, 4).item() == pytest.approx(1.0)


def test_unevenness_by_hand() -> None:
    assert build.unevenness(ONE, 1).item() == pytest.approx((1 - 0.25) ** 2 + 3 * 0.25**2)
    assert build.unevenness(HALVES, 1).item() == pytest.approx(2 * 0.25**2)
    assert build.unevenness(HALVES, 2).item() == pytest.approx(0.0)


def test_unevenness_pushes_the_crowded_expert_down() -> None:
    logits = HALVES.clone().requires_grad_()
    build.unevenness(logits, 1).backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1] < 0).all()


def test_z_loss_by_hand() -> None:
    assert build.z_loss(EVEN).item() == pytest.approx(math.log(4) ** 2)
    assert build.z_loss(torch.log(torch.tensor([[1.0, 1.0], [3.0, 1.0]]))).item() == pytest.approx(
        (math.log(2) ** 2 + math.log(4) ** 2) / 2
    )


def test_the_same_as_transformers_balance() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    theirs: Any = load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    assert build.balance(logits, 2).item() == pytest.approx(theirs.item() / 2, rel=1e-5)  # they count both choices
