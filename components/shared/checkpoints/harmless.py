"""Reads pickles of classes that hold nothing but numbers and names, and of no others: nothing of them is run."""

from __future__ import annotations

import io
import pickle
from typing import Any

_OF_METADATA = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_HARMLESS = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""What a `.metadata` may ask for, besides torch's types of numbers. None of these does anything when it is made."""
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT")
"""What a pickle numbers a value with, to name it again."""
_DTYPES = ("float", "bfloat", "int", "uint", "bool", "complex")


def load(data: bytes) -> Any:
    """Returns what was pickled.

    Raises:
        Exception: it asks for other classes, numbers more values than it may have, or is none: of whatever type
            pickle makes of it.
    """
    _require_short_memo(data)
    return _Reader(io.BytesIO(data)).load()


class _Reader(pickle.Unpickler):
    """Reads a pickle of harmless classes, and refuses any other."""

    def find_class(self, module: str, name: str) -> Any:
        # Called for each class that a pickle names, before it is imported.
        is_dtype = module == "torch" and name.startswith(_DTYPES)
        if (module, name) not in _HARMLESS and not is_dtype:
            raise pickle.UnpicklingError(f"a pickle that holds code ({module}.{name})")
        resolved = super().find_class(module, name)
        if is_dtype:
            import torch

            # `torch.float_power` begins like a type of numbers and is a function.
            if not isinstance(resolved, torch.dtype):
                raise pickle.UnpicklingError(f"a pickle that holds code ({module}.{name})")
        return resolved


def _require_short_memo(data: bytes) -> None:
    """Checks that a pickle numbers no more values than it may have: its reader makes room for the highest number.

    Raises:
        UnpicklingError: it does.
    """
    import pickletools

    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _MEMO and (argument or 0) > len(data):
            raise pickle.UnpicklingError(f"it has a value of number {argument:,}, and {len(data):,} bytes")
