"""Weights in 4 bits on a CPU: an evaluation leaves them as they are."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch

from baton.models import loading
from tests.support import tiny

SIZE = 64


def constants(layer: Any) -> dict[str, torch.Tensor]:
    """Returns copies of the packed weights and their constants."""
    state = layer.weight.quant_state.as_dict(packed=False)
    return {"weight": layer.weight.data.clone(), **{k: v.clone() for k, v in state.items() if torch.is_tensor(v)}}


def evaluate(layer: Any) -> None:
    layer.eval()
    with torch.no_grad():
        layer(torch.randn(2, SIZE))
    layer.train()


def make_layer() -> Any:
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    return layer.to("cpu")


def test_an_evaluation_changes_no_constant_and_cuts_no_gradient() -> None:
    layer = make_layer()
    loading._keep_layout(torch.nn.Sequential(layer))  # type: ignore[arg-type]
    before = constants(layer)
    evaluate(layer)
    after = constants(layer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    inputs = torch.randn(2, SIZE, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None


@pytest.mark.skipif(not bitsandbytes.functional.has_avx512bf16(), reason="this CPU has no AVX512-BF16")
def test_by_itself_bitsandbytes_rounds_them() -> None:
    layer = make_layer()
    before = constants(layer)
    evaluate(layer)
    assert layer.weight.quant_state.packing_format_for_cpu
    assert not torch.equal(before["weight"], layer.weight.data)


def test_a_recipes_model_keeps_its_layout(tiny_base: str) -> None:
    quantized = {"quantization": {"bits": 4, "compute_dtype": "float32"}}
    recipe = tiny.recipe(tiny_base, model=quantized, adapter={"type": "lora", "r": 2})
    model = loading.load_model(tiny_base, recipe)
    layers = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear4bit)]
    assert layers
    assert not any(each.support_avx512bf16_for_cpu for each in layers)
