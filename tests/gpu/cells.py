"""Cells of the exactness matrix that need a CUDA GPU, and what of each a CPU can show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.exactness.matrix import LORA, NEW_TOKENS, SCRATCH, WRITES, Cell, dropping

GPU: dict[str, Any] = {"resources": {"gpus": 1}}
QLORA: dict[str, Any] = {"adapter": {**LORA, "dropout": 0.1}, "model": {"quantization": {"compute_dtype": "bfloat16"}}}
PAGED: dict[str, Any] = {**SCRATCH, "from_scratch": {**SCRATCH["from_scratch"], "hidden_size": 256}}
"""A model with weights of 100,000 numbers and more, the fewest whose optimizer state bitsandbytes pages, and a head
whose numbers fill no whole blocks of 256."""
RNG = ("rng",)
BITS, LIGER, FLASH = "bitsandbytes", "liger_kernel", "flash_attn"
PIP = {BITS: "bitsandbytes", LIGER: "liger-kernel", FLASH: "flash-attn"}
"""Package → what pip calls it."""
ELSEWHERE = "tests/exactness has its cell for CPUs"
CPU_STEPS = 7


@dataclass(frozen=True)
class GPUCell:
    """A cell for a GPU.

    Attributes:
        cell: The cell.
        package: A package that it needs beside the lock's, None for none.
        no_half: Why a CPU cannot run it or need not, empty where it does.
        needs: Parts of the state without which it is not exact: its negative control.
    """

    cell: Cell
    package: str | None = None
    no_half: str = ""
    needs: tuple[str, ...] = ("optimizer", "scheduler")

    @property
    def half(self) -> Cell:
        """The same on a CPU: its recipe in fewer steps."""
        changes = {name: section for name, section in self.cell.changes.items() if name != "resources"}
        return dataclasses.replace(self.cell, changes=changes, steps=CPU_STEPS)

    @property
    def is_quick(self) -> bool:
        """Whether its half belongs to `make test`."""
        return self.cell.name == "sft-lora-cuda-bf16-dropout"


def cells() -> Iterator[GPUCell]:
    """Yields them."""
    for group in GROUPS.values():
        yield from group()


def _of_methods() -> Iterator[GPUCell]:
    for method in ("sft", "dpo", "kto", "reward", "orpo", "grpo", "rloo"):
        elsewhere = "" if method == "sft" else ELSEWHERE
        yield _cell(method, "full", "cuda", no_half=elsewhere)
        yield _cell(
            method, "lora", "cuda bf16 dropout", dropping(method, 0.2, precision="bf16"), needs=RNG, no_half=elsewhere
        )
        scaled = _training(precision="fp16", fp16_initial_scale=2.0**30)
        yield _cell(method, "full", "cuda fp16", scaled, needs=("scaler",), no_half="gradients are scaled on GPUs")
    thrice = _training(grpo={**WRITES, "num_iterations": 3})
    yield _cell("grpo", "full", "cuda three iterations", thrice, needs=("method",), no_half=ELSEWHERE)


def _in_few_bits() -> Iterator[GPUCell]:
    for method in ("sft", "dpo", "grpo"):
        elsewhere = "" if method == "sft" else "sft shows what is held in few bits"
        yield _cell(
            method,
            "lora",
            "nf4",
            {**QLORA, **dropping(method, 0.1, precision="bf16")},
            needs=RNG,
            package=BITS,
            no_half=elsewhere,
        )
    grown = {**QLORA, "model": {**QLORA["model"], **NEW_TOKENS}}
    yield _cell("sft", "lora", "nf4 new tokens", {**grown, **_bf16()}, needs=RNG, package=BITS)
    eight = {**QLORA, "model": {"quantization": {"bits": 8}}}
    yield _cell("sft", "lora", "8 bit", eight, needs=RNG, package=BITS)
    for optimizer in ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "paged_ademamix_8bit"):
        why = "its pages are CUDA's" if optimizer == "paged_ademamix_8bit" else ""
        changes = {"model": PAGED, **_training(optimizer=optimizer)}
        yield _cell("sft", "full", optimizer.replace("_", " "), changes, package=BITS, no_half=why)


def _arithmetic() -> Iterator[GPUCell]:
    yield _cell("sft", "full", "tf32", _training(precision="tf32"), no_half="a CPU does not round to TF32")
    yield _cell("sft", "full", "tf32 and bf16", _bf16(tf32=True), no_half="a CPU does not round to TF32")
    yield _cell("sft", "full", "bf16 weights", {"model": {"dtype": "bfloat16"}, **_bf16()})
    yield _cell("sft", "full", "cuda compile", _bf16(compile=True), no_half=ELSEWHERE)
    autotuned = _bf16(compile="max-autotune", tf32=True)
    yield _cell("sft", "full", "cuda compile autotuned", autotuned, no_half="a CPU does not round to TF32")
    yield _cell("sft", "full", "cuda checkpointing", _bf16(gradient_checkpointing=True))
    offloaded = _training(activation_offloading=True)
    yield _cell("sft", "full", "activation offloading", offloaded, no_half="activations are in the host's memory")
    yield _cell("sft", "full", "liger", _bf16(liger=True), package=LIGER, no_half="its kernels are for GPUs")
    yield _cell(
        "dpo", "lora", "liger", dropping("dpo", 0.2, precision="bf16", liger=True), needs=RNG, package=LIGER,
        no_half="its kernels are for GPUs",
    )  # fmt: skip


def _attention() -> Iterator[GPUCell]:
    packed = {"data": {"columns": {"text": "story"}, "packing": True, "max_length": 16}}
    for name in ("eager", "sdpa", "flex_attention"):  # packed rows have no padding, so that sdpa takes its flash kernel
        changes = {"model": {"attention": name}, **packed, **_bf16()}
        why = "" if name == "sdpa" else "sdpa shows how attention is chosen"
        yield _cell("pretrain", "full", f"cuda {name.replace('_', ' ')}", changes, no_half=why)
    changes = {"model": {"attention": "flash_attention_2"}, **_bf16()}
    yield _cell("sft", "full", "flash attention 2", changes, package=FLASH, no_half="its kernels are for GPUs")


def _cell(
    method: str, weights: str, feature: str, changes: Any = None, **settings: Any
) -> GPUCell:  # fmt: skip
    return GPUCell(Cell(method, weights, feature, {**(changes or {}), **GPU}, quick=True), **settings)


def _training(**settings: Any) -> dict[str, Any]:
    return {"training": settings}


def _bf16(**settings: Any) -> dict[str, Any]:
    return _training(precision="bf16", **settings)


GROUPS: dict[str, Callable[[], Iterator[GPUCell]]] = {
    "methods": _of_methods,
    "few bits": _in_few_bits,
    "arithmetic": _arithmetic,
    "attention": _attention,
}
