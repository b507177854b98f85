"""The rules of the check, with answers written by hand."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.errors import BatonError
from baton.export import parity
from baton.export.parity import ModelAnswer, ParityInputs, Reading, Reference
from baton.runs.outcomes import LlamaCpp

DUE = Reference([ModelAnswer([1, 0], np.array([[0.0, 10.0], [2.0, -1.0]], dtype=np.float32))], {}, 1e-3)


def _said(tokens: list[int], change: float = 0.0, rounds: int = 1) -> Reading:
    logits = DUE.answers[0].logits.copy()
    logits[1, 1] += change
    return Reading([ModelAnswer(tokens, logits)] * rounds, {"library": "some 1.0", "weights": {}})


def test_the_same_bits() -> None:
    found = parity.compare("safetensors", _said([1, 0]), DUE, DUE.rounding)
    assert found.to_json() == {
        "library": "some 1.0",
        "tokens": 2,
        "bitwise": True,
        "max_abs_difference": 0.0,
        "words": "some 1.0: weights the same bit for bit, 2 of 2 tokens the same, logits the same bit for bit",
    }


def test_logits_may_differ_by_a_share_of_the_largest() -> None:
    found = parity.compare("onnx", _said([1, 0], 0.0078125, rounds=2), DUE, 1e-3)
    assert (found.bitwise, found.max_abs_difference, found.tokens) == (False, 0.0078125, 2)
    with pytest.raises(BatonError, match=r"differ from the trained model's by 0\.0156; at most 0\.01 was expected"):
        parity.compare("onnx", _said([1, 0], 0.015625), DUE, 1e-3)


def test_what_is_no_number_does_not_count() -> None:
    with pytest.raises(BatonError, match="does not count"):
        parity.compare("onnx", _said([1, 0], math.nan), DUE, 1e-3)


def test_other_tokens_do_not_count() -> None:
    with pytest.raises(BatonError, match=r"the onnx export writes \[1, 1\] instead of \[1, 0\]"):
        parity.compare("onnx", _said([1, 1]), DUE, 1e-3)


@pytest.mark.parametrize(("written", "same"), [([0, 1], 0), ([1, 1], 1), ([1, 0], 2)])
def test_of_two_tokens_as_good_as_equal_either_may_be_written(written: list[int], same: int) -> None:
    """The largest logit is 10, so that each may be 0.01 off: those of the two places are 0.0195 apart."""
    logits = np.array([[10.0 - 0.01953125, 10.0], [10.0, 10.0 - 0.01953125]], dtype=np.float32)
    due = Reference([ModelAnswer([1, 0], logits)], {}, 1e-3)
    reading = Reading([ModelAnswer(written, logits)], {"library": "some 1.0"})
    words = parity.compare("onnx", reading, due, 1e-3).words
    assert f"{same} of 2 tokens the same" in words
    assert ("the next one a tie" in words) == (same < 2)
    if same < 2:
        with pytest.raises(BatonError, match="does not count"):
            parity.compare("onnx", reading, due, 0.9e-3)


def test_other_shapes_do_not_count() -> None:
    short = Reading([ModelAnswer([1, 0], DUE.answers[0].logits[:1])], {"library": "some 1.0"})
    with pytest.raises(BatonError, match="by inf"):
        parity.compare("onnx", short, DUE, 1e-3)


def test_weights_are_held_against_the_trained_ones() -> None:
    parity.require_weights("m.gguf", {"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    with pytest.raises(BatonError, match="the trained weights in b, c;"):
        parity.require_weights("m.gguf", {"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})


def test_tokens_shared_before_the_first_that_differs() -> None:
    assert parity.shared_tokens([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3]]) == 4


def test_llama_cpp_must_write_the_same_in_full_precision_only() -> None:
    said = {"version": "1", "texts": [[7]], "tokens": [[1, 1]]}
    reading = Reading([], {"llama_cpp": said})
    found = parity.check_llama_cpp("m.gguf", reading, DUE, [[7]], exact=False)
    assert found == LlamaCpp(version="1", tokens=1)
    with pytest.raises(BatonError, match=r"llama.cpp with m.gguf writes \[1, 1\] instead of \[1, 0\]"):
        parity.check_llama_cpp("m.gguf", reading, DUE, [[7]], exact=True)
    with pytest.raises(BatonError, match="splits texts into other tokens"):
        parity.check_llama_cpp("m.gguf", reading, DUE, [[8]], exact=False)


INPUTS = ParityInputs([[5, 6, 7], list(range(9, 40))], 4)


def _model(dtype: torch.dtype) -> LlamaForCausalLM:
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings, num_hidden_layers=2, initializer_range=0.2)).to(dtype)


def _asked(model: LlamaForCausalLM, expected: Reference) -> Reading:
    inputs = replace(INPUTS, followed=[answer.tokens for answer in expected.answers])
    return Reading(parity.ask_model(model, inputs), {"library": "some", "weights": parity.weight_digests(model)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_lie_otherwise_are_the_same_model(dtype: torch.dtype) -> None:
    """Transposed in memory, and each at an odd address: equal values, which other kernels may add in another order."""
    model = _model(dtype)
    expected = parity.make_reference(model, INPUTS)
    moved = copy.deepcopy(model)
    for value in moved.parameters():
        odd = torch.empty(value.numel() + 1, dtype=dtype)[1:]
        value.data = odd.view(value.T.shape).copy_(value.data.T).T if value.ndim == 2 else odd.copy_(value.data)
    assert any(not value.is_contiguous() for value in moved.parameters())
    reading = _asked(moved, expected)
    parity.require_weights("the export", reading.notes["weights"], expected.weights)
    parity.compare("safetensors", reading, expected, expected.rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bound_holds_what_rounding_does_and_not_what_another_weight_does(dtype: torch.dtype) -> None:
    """The same weights in float64 stand for any order of additions: what is left is the type's own rounding."""
    model = _model(dtype)
    expected = parity.make_reference(model, INPUTS)
    parity.compare("safetensors", _asked(copy.deepcopy(model).double(), expected), expected, expected.rounding)
    damaged = copy.deepcopy(model)
    damaged.model.layers[0].mlp.down_proj.weight.data[0] *= -1
    damaged.model.layers[1].self_attn.v_proj.weight.data *= -1
    reading = _asked(damaged, expected)
    with pytest.raises(BatonError, match="does not count"):
        parity.compare("safetensors", reading, expected, expected.rounding)


def test_one_flipped_bit_of_a_weight_does_not_count() -> None:
    """The last of a weight's 24 bits, of which the logits cannot tell."""
    model = _model(torch.float32)
    expected = parity.make_reference(model, INPUTS)
    model.model.layers[0].mlp.down_proj.weight.data.view(torch.int32)[0, 0] ^= 1
    reading = _asked(model, expected)
    parity.compare("safetensors", reading, expected, expected.rounding)
    with pytest.raises(BatonError, match=r"trained weights in model\.layers\.0\.mlp\.down_proj\.weight;"):
        parity.require_weights("the export", reading.notes["weights"], expected.weights)


def test_the_bound_grows_with_the_type_and_the_blocks() -> None:
    shares = {dtype: parity.rounding(_model(dtype), 35) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    assert list(shares.values()) == sorted(shares.values())
    assert shares[torch.float32] < 1e-5
    assert shares[torch.bfloat16] == pytest.approx(4 * 2**-8 * math.sqrt(2 * parity.ROUNDINGS), rel=1e-3)
