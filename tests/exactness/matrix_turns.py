"""Cells of the matrix for trials that take turns inside one process."""

from __future__ import annotations

from collections.abc import Iterator

from tests.exactness.matrix import METHODS, NEW_TOKENS, SCRATCH, WRITES, Cell, Changes, dropping, training

NAME = "shared process"


def cells() -> Iterator[Cell]:
    """Yields each method with all weights and with an adapter, then settings that leave most behind in a process."""
    for method in METHODS:
        yield Cell(method, "full", NAME)
        yield Cell(method, "lora", f"{NAME}, dropout", dropping(method, 0.3), quick=method == "sft")
    further: dict[str, tuple[str, str, Changes]] = {
        "neftune": ("sft", "full", training(neftune_alpha=5.0)),
        "new tokens": ("sft", "lora", {"model": NEW_TOKENS, **dropping("sft", 0.2)}),
        "skipped steps": ("sft", "full", training(guard={"skip": [1, 6, 7, 13], "grad_norm": 1000})),
        "early stopping": (
            "sft",
            "full",
            {**training(early_stopping={"patience": 3, "threshold": 10.0}), "evaluation": {"every": 1}},
        ),
        "bf16": ("dpo", "lora", dropping("dpo", 0.1, precision="bf16")),
        "moving reference": ("dpo", "full", training(dpo={"sync_reference": {"every": 2, "mix": 0.5}})),
        "three iterations": ("grpo", "full", training(grpo={**WRITES, "num_iterations": 3})),
        "attention dropout": ("pretrain", "full", {"model": SCRATCH, **training(micro_batch_size=2)}),
    }
    for feature, (method, weights, changes) in further.items():
        yield Cell(method, weights, f"{NAME}, {feature}", changes)
