"""Bytes of optimizers' states, by their Transformers names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.components.shared.recipe import Training

if TYPE_CHECKING:
    from torch import nn

FLOAT = 4
"""Bytes of a number in fp32."""
BITSANDBYTES = {"adam": 2, "lion": 1, "ademamix": 3}
"""Values per weight that bitsandbytes' optimizers keep."""
BLOCK = 256
"""Values that share one fp32 constant in their 8-bit states (Dettmers et al., arXiv:2110.02861)."""
SMALL = 4096
"""Values below which a tensor's state stays in 32 bits there."""


def num_bytes(training: Training, model: nn.Module) -> int:
    """Returns the bytes of the optimizer's state for what is trained of a model."""
    from torch import nn

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(
        _of_tensor(training, value, is_embedding=id(value) in embeddings)
        for value in model.parameters()
        if value.requires_grad
    )


def _of_tensor(training: Training, value: Any, *, is_embedding: bool) -> int:
    name = training.optimizer
    bytes_each = next((bytes_each for part, bytes_each in BITSANDBYTES.items() if part in name), 0)
    if name == "adafactor":
        return _adafactor(tuple(value.shape))
    if name in ("adamw_torch", "adamw_torch_fused"):
        return int(2 * value.numel() * value.element_size() + FLOAT)  # two moments, and the step as a number
    if name in ("sgd", "rmsprop", "adagrad"):
        options = training.optimizer_options
        momentum = float(options.get("momentum", 0)) != 0
        if training.optimizer == "sgd":
            return int(momentum * value.numel() * value.element_size())
        centered = str(options.get("centered", False)).lower() in ("true", "1", "yes")
        num_values = 1 + (momentum + centered if training.optimizer == "rmsprop" else 0)
        return int(num_values * value.numel() * value.element_size() + FLOAT)
    if name.endswith("8bit") and value.numel() >= SMALL and not is_embedding:
        return int(bytes_each * (value.numel() + -(-value.numel() // BLOCK) * FLOAT))
    return int(bytes_each * value.numel() * FLOAT)


def _adafactor(shape: tuple[int, ...]) -> int:
    """Returns the bytes of Adafactor's second moment: of rows and columns where there are any (arXiv:1804.04235)."""
    if len(shape) < 2:
        values = shape[0] if shape else 1
    else:
        leading = 1
        for size in shape[:-2]:
            leading *= size
        values = leading * (shape[-2] + shape[-1])
    return (values + 1) * FLOAT  # and the root mean square of the weights
