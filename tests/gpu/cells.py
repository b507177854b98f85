"""Cells of the exactness matrix that need a CUDA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.resume.matrix import LORA, NEW_TOKENS, WRITES, Cell

GPU: dict[str, Any] = {"resources": {"gpus": 1}}
QLORA: dict[str, Any] = {"adapter": {**LORA, "dropout": 0.1}, "model": {"quantization": {"compute_dtype": "bfloat16"}}}
RNG = ("rng",)


def cells() -> Iterator[Cell]:
    """Yields them."""
    for method in ("sft", "dpo", "kto", "reward", "orpo", "grpo", "rloo"):
        yield _cell(method, "full", "cuda")
        yield _cell(method, "lora", "cuda bf16 dropout", {**_adapter(), **_training(precision="bf16")}, needs=RNG)
        yield _cell(
            method, "full", "cuda fp16", _training(precision="fp16", fp16_initial_scale=2.0**30), needs=("scaler",)
        )
    for method in ("sft", "dpo", "grpo"):
        yield _cell(method, "lora", "nf4", {**QLORA, **_training(precision="bf16")}, needs=RNG)
    grown = {**QLORA, "model": {**QLORA["model"], **NEW_TOKENS}}
    yield _cell("sft", "lora", "nf4 new tokens", {**grown, **_training(precision="bf16")}, needs=RNG)
    eight = {**QLORA, "model": {"quantization": {"bits": 8}}}
    yield _cell("sft", "lora", "8 bit", eight, needs=RNG)
    for optimizer in ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"):
        yield _cell("sft", "full", optimizer.replace("_", " "), _training(optimizer=optimizer))
    yield _cell("sft", "full", "tf32", _training(precision="tf32"))
    yield _cell("sft", "full", "cuda compile", _training(compile=True, precision="bf16"))
    yield _cell("sft", "full", "cuda checkpointing", _training(gradient_checkpointing=True, precision="bf16"))
    yield _cell("sft", "full", "activation offloading", _training(activation_offloading=True))
    yield _cell(
        "grpo", "full", "cuda three iterations", _training(grpo={**WRITES, "num_iterations": 3}), needs=("method",)
    )


def _cell(method: str, weights: str, feature: str, changes: Any = None, **settings: Any) -> Cell:
    return Cell(method, weights, feature, {**(changes or {}), **GPU}, quick=True, **settings)


def _training(**settings: Any) -> dict[str, Any]:
    return {"training": settings}


def _adapter() -> dict[str, Any]:
    return {"adapter": {**LORA, "dropout": 0.2}}
