"""Weights that are published in 4 bits and trained in more."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.models import loading, trainable
from baton.recipe import load
from tests.gallery import twins
from tests.support import tiny

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What 4 bits stand for in MXFP4 (OCP Microscaling Formats, table 5)."""


def test_mxfp4_is_read_as_numbers_that_can_be_trained(tmp_path: Path) -> None:
    twins.make("openai/gpt-oss-20b", str(tmp_path), ())
    settings = trainable.unpacked(str(tmp_path))
    assert settings["quantization_config"].dequantize, "else it stays packed on a GPU with kernels for it"
    recipe = load.validate(
        {"name": "t", "model": {"base": str(tmp_path)}, "data": {"source": "r.jsonl"}}, origin="r.yaml"
    )
    packed = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks, scales = packed[f"{name}_blocks"], packed[f"{name}_scales"]
    numbers = torch.stack([VALUES[(blocks & 15).long()], VALUES[(blocks >> 4).long()]], -1)  # the lower half first
    expected = (numbers.flatten(-2) * 2.0 ** (scales[..., None].float() - 127)).flatten(-2).transpose(1, 2)
    for model in (loading.load_model(str(tmp_path), recipe), loading.load_model(str(tmp_path))):
        weight = dict(model.named_parameters())[name]
        assert weight.requires_grad
        assert torch.equal(weight.float(), expected)
        assert getattr(model.config, "quantization_config", None) is None
        assert not getattr(model, "is_quantized", False)
        model.save_pretrained(tmp_path / "saved")
        saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
        assert all(torch.equal(value, saved[name]) for name, value in model.named_parameters())


def test_other_models_are_read_as_ever(tmp_path: Path) -> None:
    assert trainable.unpacked(tiny.make_base(tmp_path / "base")) == {}
