"""The matrix's cells of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.exactness.matrix import METHODS, SCRATCH, WRITES, Cell, Changes, dropping, training


def cells() -> Iterator[Cell]:
    """Two processes on CPUs: each its own random state and completions, and with `fsdp` its own shards."""
    for method in METHODS:
        yield _both(method, "ddp x2")
        yield _both(method, "fsdp x2")
    for method in ("sft", "pretrain", "dpo", "kto", "grpo"):
        sizes = {"batch_size": 8, "micro_batch_size": 2} if method == "kto" else {"micro_batch_size": 1}
        yield _both(method, "ddp x2, accumulation", **sizes)
    for method in ("sft", "pretrain", "dpo"):
        yield _both(method, "fsdp x2, accumulation", micro_batch_size=1)
    for method in ("sft", "dpo", "grpo"):
        yield _both(method, "ddp x2", weights="lora")
        yield _both(method, "fsdp x2", weights="lora")
    yield _both("pretrain", "fsdp x2, attention dropout", {"model": SCRATCH})
    yield _both("grpo", "ddp x2, groups over both", grpo={**WRITES, "num_generations": 4})
    for method in ("grpo", "rloo"):
        thrice = {method: {**WRITES, "num_iterations": 3}}
        yield _both(method, "ddp x2, three iterations", **thrice)


def _both(
    method: str,
    feature: str,
    changes: Changes | None = None,
    *,
    weights: str = "full",
    **settings: Any,
) -> Cell:
    """Returns a cell of two processes by the strategy that its feature begins with."""
    settings["parallel"] = {"strategy": feature.partition(" ")[0], "processes": 2}
    both = dropping(method, 0.3, **settings) if weights == "lora" else training(**settings)
    return Cell(method, weights, feature, {**(changes or {}), **both}, steps=12)
