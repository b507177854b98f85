"""The digest of values in memory: equal for equal values, different for any difference."""

import collections
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from baton.checkpoint.digest import TensorHash, tree_digest

T = torch.tensor

STATE = {
    "model": {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)},
    "step": 7,
    "lr": 1e-4,
    "rng": (3, "x", b"y", None, True, np.arange(3, dtype=np.uint32)),
    0: [],
}

ONE_BIT = T([1.0, 2.0])
ONE_BIT.view(torch.int32)[1] ^= 1

EQUAL: dict[str, tuple[Any, Any]] = {
    "key order": ({"a": 1, "b": T([1])}, {"b": T([1]), "a": 1}),
    "copy": (T([1.0, 2.0]), T([1.0, 2.0]).clone()),
    "strides": (torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).t().contiguous().t()),
    "view of more": (torch.arange(9.0)[2:4], T([2.0, 3.0])),
    "parameter": (torch.nn.Parameter(T([1.0])), T([1.0])),
    "kind of mapping": (collections.OrderedDict(a=1), {"a": 1}),
    "kind of sequence": ((1, 2), [1, 2]),
    "NumPy integer": (np.int64(3), 3),
    "NumPy float": (np.float64(0.1), 0.1),
    "array strides": (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
}

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "dtype": (T([1], dtype=torch.int32), T([1], dtype=torch.int64)),
    "dtype of equal bytes": (T([0], dtype=torch.int32), T([0], dtype=torch.float32)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "scalar and vector": (T(1.0), T([1.0])),
    "empty shapes": (torch.zeros(0, 3), torch.zeros(3, 0)),
    "sign of zero": (T([0.0]), T([-0.0])),
    "sign of a float zero": (0.0, -0.0),
    "one bit": (T([1.0, 2.0]), ONE_BIT),
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "int and text": (1, "1"),
    "text and bytes": ("a", b"a"),
    "none and text": (None, "None"),
    "next float": (0.1, 0.1 + 2**-56),
    "key type": ({1: 0}, {"1": 0}),
    "key name": ({"a": 1}, {"b": 1}),
    "list order": ([1, 2], [2, 1]),
    "nesting": ([[1], 2], [[1, 2]]),
    "tensor order": ([T([1]), T([2])], [T([2]), T([1])]),
    "tensor and array": (T([1]), np.array([1])),
    "array dtype": (np.array([1], np.int32), np.array([1], np.uint32)),
    "array shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "a key that looks like more": ({"a": {"b": 1}}, {"a={1:str:b": 1}),
    "missing key": ({"a": 1, "b": None}, {"a": 1}),
}


@pytest.mark.parametrize(("a", "b"), EQUAL.values(), ids=EQUAL)
def test_equal(a: Any, b: Any):
    assert tree_digest(a) == tree_digest(b)


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT)
def test_different(a: Any, b: Any):
    assert tree_digest(a) != tree_digest(b)
    assert tree_digest({"state": [a]}) != tree_digest({"state": [b]})


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
    ids=str,
)
def test_every_dtype_counts_by_its_bytes(dtype: torch.dtype):
    ones, other = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    other[4] = 0

    assert tree_digest(ones) == tree_digest(torch.ones(5, dtype=dtype))
    assert tree_digest(ones) != tree_digest(other)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 1j, len, np.array([object()]), {"a": [lambda: 0]}],
    ids=["object", "set", "complex", "function", "array of objects", "nested"],
)
def test_a_value_without_defined_content(value: Any):
    with pytest.raises(TypeError, match="has no defined content"):
        tree_digest(value)


def test_another_process_gives_the_same():
    code = (
        "import torch; from baton.checkpoint.digest import tree_digest; "
        "print(tree_digest({'b': torch.arange(4.), 'a': ['x', 2, 0.5, None, True]}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert process.stdout.strip() == tree_digest({"a": ["x", 2, 0.5, None, True], "b": torch.arange(4.0)})


def test_a_state_is_left_as_it_was():
    before = tree_digest(STATE)

    assert STATE["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tree_digest(STATE) == before


def test_it_is_that_of_all_releases():
    """Compared with checkpoints of older releases: XXH3-128 and SHA-256 as in `docs/trust/exactness.md`."""
    value = {"b": torch.arange(4.0), "a": ["x", 2, 0.5, None, True, b"y"], "n": np.array([1, 2], np.uint32)}
    assert tree_digest(value) == "04e07cc6a5cb3f89bb62e2287baae7fd5cf15bddaeae1a85be1158c6507a9089"


def test_a_tensor_that_comes_in_pieces_has_the_digest_of_the_whole():
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    pieces = TensorHash(whole.dtype, (3, 4))
    for piece in whole.flatten().split([5, 0, 7]):
        pieces.update(piece)
    assert tree_digest([pieces, 1]) == tree_digest([whole, 1])
    assert tree_digest({"a": pieces}) != tree_digest({"a": whole + 1})


def test_of_a_tensor_in_parts_this_process_part_counts():
    part = torch.arange(3.0)

    class OfFsdp(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return part

    of_deepspeed = torch.nn.Parameter(torch.empty(0))
    of_deepspeed.ds_tensor = part
    assert tree_digest(torch.empty(0).as_subclass(OfFsdp)) == tree_digest(of_deepspeed) == tree_digest(part)
