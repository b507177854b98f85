"""What AdamW is told: it reaches the groups of parameters and decides their steps, as computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

RATE = 1e-2
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "adam_betas": {"adam_betas": [0.5, 0.7]},
    "adam_epsilon": {"adam_epsilon": 0.5},
}


def stepped(start: float, gradients: list[float], betas: tuple[float, float], epsilon: float) -> float:
    """Returns a weight after AdamW's steps without decay (arXiv:1711.05101, algorithm 2)."""
    value, first, second = start, 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        corrected = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
        value -= RATE * corrected[0] / (corrected[1] ** 0.5 + epsilon)
    return value


@pytest.mark.parametrize("name", SETTINGS)
def test_the_optimizers_steps_are_those_of_its_settings(name: str, build: Callable[..., Any]) -> None:
    settings = SETTINGS[name]
    adamw = {"optimizer": "adamw_torch", "learning_rate": RATE, "weight_decay": 0.0, **settings}
    trainer = build("sft", training=adamw)
    trainer.create_optimizer()
    betas, epsilon = tuple(settings.get("adam_betas", (0.9, 0.999))), settings.get("adam_epsilon", 1e-8)
    for group in trainer.optimizer.param_groups:
        assert (tuple(group["betas"]), group["eps"]) == (betas, epsilon)
    weights = [value for value in trainer.model.parameters() if value.requires_grad]
    starts = [float(value.flatten()[0]) for value in weights]
    gradients = [0.5, -0.25, 1.0]
    for gradient in gradients:
        for value in weights:
            value.grad = torch.full_like(value, gradient)
        trainer.optimizer.step()
    ends = [float(value.detach().flatten()[0]) for value in weights]
    assert ends == pytest.approx([stepped(start, gradients, betas, epsilon) for start in starts], rel=1e-5, abs=1e-6)
    if settings:
        plain = [stepped(start, gradients, (0.9, 0.999), 1e-8) for start in starts]
        assert all(abs(end - other) > 1e-3 for end, other in zip(ends, plain, strict=True))
