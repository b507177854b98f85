"""The cells of the matrix that need a CUDA GPU; without one, of each what a CPU can show."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.exactness import test_matrix
from tests.gpu.cells import PIP, GPUCell, cells
from tests.gpu.conftest import HAS_GPU

pytestmark = [pytest.mark.gpu] if HAS_GPU else []


def _params() -> list[Any]:
    return [pytest.param(cell, id=cell.cell.name, marks=_marks(cell)) for cell in cells()]


def _marks(cell: GPUCell) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.timeout(900)]
    if cell.package and importlib.util.find_spec(cell.package) is None:
        marks.append(pytest.mark.skip(f"{PIP[cell.package]} is not installed"))
    if HAS_GPU:
        return marks
    if cell.no_half:
        return [*marks, pytest.mark.gpu, pytest.mark.skip(f"no GPU, and {cell.no_half}")]
    return marks if cell.is_quick else [*marks, pytest.mark.slow]


@pytest.mark.parametrize("cell", _params())
def test_chunks_end_on_the_bits_of_one_run(
    cell: GPUCell,
    grid: Any,
    legs: Any,
    tell: Callable[..., None],
) -> None:
    each = cell.cell if HAS_GPU else cell.half
    test_matrix.test_chunks_end_on_the_bits_of_one_run(each, grid, legs)
    states = []
    for left_out in ((), cell.needs):
        run = legs.prepare(grid(each), f"{each.name}-{'-'.join(left_out) or 'nothing'}-left-out")
        legs.cut(run, (each.middle, each.steps))  # one resume has to show it
        legs.train(run, leave_out=left_out)
        states.append(legs.final(run).meta.state)
    assert states[0]["weights"] != states[1]["weights"]
    tell("same bits", f"{each.steps} steps in 1 and 4 chunks; without {', '.join(cell.needs)} others")


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_attention_gives_the_same_gradients_each_time(backend: str, tell: Callable[..., None]) -> None:
    """With determinism asked for; without it, how often it does not is told."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not HAS_GPU and backend in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        pytest.skip("no GPU, and it is for GPUs")
    device, dtype = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float32)
    torch.manual_seed(0)
    shape = (4, 8, 512, 64) if HAS_GPU else (2, 2, 64, 16)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def gradients() -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        return torch.cat([each.flatten() for each in torch.autograd.grad(out.float().square().sum(), inputs)])

    def others(deterministic: bool) -> int:
        torch.use_deterministic_algorithms(deterministic)
        try:
            first = gradients()
            return sum(not torch.equal(gradients(), first) for _ in range(8))
        finally:
            torch.use_deterministic_algorithms(False)

    loose = others(deterministic=False)
    tell("without determinism", f"{loose} of 8 differ")
    if HAS_GPU and backend == "CUDNN_ATTENTION":
        with pytest.raises(RuntimeError, match="No available kernel"):
            others(deterministic=True)
        tell("with determinism", "torch refuses it")
        return
    assert others(deterministic=True) == 0
    tell("with determinism", "0 of 8 differ")
