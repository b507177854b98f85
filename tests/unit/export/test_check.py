"""The rules of the check, with answers written by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from components.export import check
from components.export.answers import Answer
from components.export.check import Reading
from components.shared.errors import BatonError

DUE = [Answer([4, 5], np.array([[0.0, 10.0], [2.0, -1.0]], dtype=np.float32))]


def _said(tokens: list[int], change: float = 0.0, rounds: int = 1) -> Reading:
    logits = DUE[0].logits.copy()
    logits[1, 1] += change
    return Reading([Answer(tokens, logits)] * rounds, {"library": "some 1.0"})


def test_the_same_bits() -> None:
    found = check.compare("safetensors", _said([4, 5]), DUE, bitwise=True)
    assert found == {
        "library": "some 1.0",
        "tokens": 2,
        "bitwise": True,
        "max_abs_difference": 0.0,
        "words": "some 1.0: 2 of 2 tokens the same, logits the same bit for bit",
    }


def test_another_engine_may_differ_by_a_thousandth_of_the_largest_logit() -> None:
    found = check.compare("onnx", _said([4, 5], 0.0078125, rounds=2), DUE, bitwise=False)
    assert (found["bitwise"], found["max_abs_difference"], found["tokens"]) == (False, 0.0078125, 2)
    with pytest.raises(BatonError, match=r"differ from the trained model's by 0\.0156; at most 0\.01 was expected"):
        check.compare("onnx", _said([4, 5], 0.015625), DUE, bitwise=False)


@pytest.mark.parametrize("bitwise", [True, False])
def test_what_is_no_number_does_not_count(bitwise: bool) -> None:
    with pytest.raises(BatonError, match="does not count"):
        check.compare("onnx", _said([4, 5], math.nan), DUE, bitwise=bitwise)


def test_one_bit_is_too_much_where_bits_are_promised() -> None:
    with pytest.raises(BatonError, match="the same bits were expected"):
        check.compare("safetensors", _said([4, 5], 1e-6), DUE, bitwise=True)


def test_other_tokens_do_not_count() -> None:
    with pytest.raises(BatonError, match=r"\[4, 6\] instead of \[4, 5\]"):
        check.compare("onnx", _said([4, 6]), DUE, bitwise=False)


def test_other_shapes_do_not_count() -> None:
    short = Reading([Answer([4, 5], DUE[0].logits[:1])], {"library": "some 1.0"})
    with pytest.raises(BatonError, match="by inf"):
        check.compare("onnx", short, DUE, bitwise=False)


def test_tensors_are_held_against_the_quantizers() -> None:
    reading = Reading([], {"tensors": {"a": "1", "b": "2"}})
    check.require_tensors("m.gguf", reading, {"a": "1", "b": "2"})
    with pytest.raises(BatonError, match="quantized weights in b, c;"):
        check.require_tensors("m.gguf", reading, {"a": "1", "b": "3", "c": "4"})


def test_tokens_shared_before_the_first_that_differs() -> None:
    assert check.agreement([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3]]) == 4


def test_llama_cpp_must_write_the_same_in_full_precision_only() -> None:
    said = {"version": "1", "texts": [[7]], "tokens": [[4, 6]]}
    reading = Reading([], {"llama_cpp": said})
    found = check.of_llama_cpp("m.gguf", reading, DUE, [[7]], exact=False)
    assert found == {"llama_cpp": {"version": "1", "tokens": 1}}
    with pytest.raises(BatonError, match=r"writes \[\[4, 6\]\] with m.gguf instead of \[\[4, 5\]\]"):
        check.of_llama_cpp("m.gguf", reading, DUE, [[7]], exact=True)
    with pytest.raises(BatonError, match="splits texts into other tokens"):
        check.of_llama_cpp("m.gguf", reading, DUE, [[8]], exact=False)
