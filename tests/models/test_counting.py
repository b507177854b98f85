"""Numbers are counted as they are before they are packed or split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from baton.models.loading import count_parameters


def test_whole_weights() -> None:
    assert count_parameters(torch.nn.Linear(6, 4).parameters()) == 28


def test_what_stage_3_leaves_in_a_weights_place_counts_as_the_weight() -> None:
    left = torch.nn.Parameter(torch.empty(0))
    left.ds_numel = 24  # type: ignore[attr-defined]
    assert count_parameters([left, torch.zeros(4)]) == 28
    left.ds_numel = 0  # type: ignore[attr-defined]
    assert count_parameters([left]) == 0


def test_two_numbers_in_a_byte() -> None:
    packed = torch.zeros(1024, 1, dtype=torch.uint8)
    packed.quant_state = SimpleNamespace(shape=torch.Size((64, 32)))  # type: ignore[attr-defined]
    assert count_parameters([packed]) == 2048


def test_what_bitsandbytes_packs() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False)
    assert count_parameters(layer.parameters()) == 2048
    layer = layer.to("cpu")
    assert layer.weight.numel() == 1024
    assert count_parameters(layer.parameters()) == 2048
