"""Digests of values in memory: the same values give the same digest in any process.

Tensors are hashed with XXH3-128, everything around them with SHA-256. Hashing holds training, so it must keep up with
memory: 16 GB/s on one core, SHA-256 1.6. The SHA-256 of a checkpoint's files protects against tampering.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def tree_digest(value: Any) -> str:
    """Digests nested containers of tensors, arrays and plain values; `TypeError` for a value of another kind.

    A tensor counts by dtype, shape and bytes on any device, a mapping by sorted keys, a number by type and exact value.
    """
    tensors: list[torch.Tensor] = []
    _collect(value, tensors)
    hashes = iter([_tensor_digest(tensor) for tensor in tensors])
    digest = hashlib.sha256()
    _feed(digest, value, hashes)
    return digest.hexdigest()


class TensorHash:
    """Hash of a tensor whose values arrive piece by piece; takes that tensor's place in a tree."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._hash = xxhash.xxh3_128(f"{dtype}{shape}".encode())

    def update(self, values: torch.Tensor) -> None:
        flat = values.detach()
        if flat.is_cuda:  # to locked memory, which CUDA copies to directly and torch uses again
            flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
        flat = flat.cpu().contiguous()
        self._hash.update(flat.flatten().view(torch.uint8).numpy().data if flat.numel() else b"")

    def digest(self) -> bytes:
        return self._hash.digest()


def _collect(value: Any, tensors: list[torch.Tensor]) -> None:
    """Gathers tensors in the order in which `_feed` meets them."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=_key):
            _collect(value[key], tensors)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, tensors)


def _feed(digest: Any, value: Any, hashes: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(b"T" + next(hashes))
    elif isinstance(value, TensorHash):
        digest.update(b"T" + value.digest())
    elif isinstance(value, Mapping):
        digest.update(b"{%d:" % len(value))
        for key in sorted(value, key=_key):
            digest.update(_key(key).encode() + b"=")
            _feed(digest, value[key], hashes)
    elif isinstance(value, list | tuple):
        # The length comes first: the same items in another nesting get another digest.
        digest.update(b"[%d:" % len(value))
        for item in value:
            _feed(digest, item, hashes)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"A{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, float | np.floating):
        digest.update(f"f{float(value).hex()};".encode())
    elif value is None or isinstance(value, bool | int | np.integer | str | bytes):
        plain = int(value) if isinstance(value, np.integer) else value
        digest.update(f"{type(plain).__name__}{plain!r};".encode())
    else:
        raise TypeError(f"a {type(value).__name__} in the training state has no defined content; keep plain values")


def _key(key: Any) -> str:
    return f"{type(key).__name__}:{key!r}"


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    if hasattr(tensor, "to_local"):  # a DTensor: this process's shard
        tensor = tensor.to_local()
    elif hasattr(tensor, "ds_tensor"):  # DeepSpeed's stage 3: this process's partition
        tensor = tensor.ds_tensor
    whole = TensorHash(tensor.dtype, tuple(tensor.shape))
    whole.update(tensor)
    return whole.digest()
