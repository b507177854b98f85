"""Sharded checkpoints of FSDP: reads them without running pickled code, and merges them into one model.

    pytorch_model_fsdp_0/{.metadata, __0_0.distcp, …}    weights: an index, and a file for each process
    optimizer_0/{.metadata, __0_0.distcp, …}             the optimizer's state, in the same way

`.metadata` and every value except tensors are pickles, which torch loads unchecked. Here only classes of numbers
and names are loaded; any other class counts as damage.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
import warnings
from typing import TYPE_CHECKING, Any

from baton.errors import DamagedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


WEIGHTS, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
FOLDERS = (WEIGHTS, OPTIMIZER)
METADATA = ".metadata"
PREFIX = "model."  # Accelerate saves the weights under this one entry
SHARD_SIZE = "5GB"  # largest file of a merged model, as in Transformers; memory holds one at a time
ADAPTER = "adapter_config.json"
SUFFIXES = (".pt", ".pth", ".bin", ".pkl")  # files that PyTorch writes as pickles
_OF_METADATA = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
# Classes that a `.metadata` may name, in addition to torch's dtypes. Constructing one has no effect.
_SAFE = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT")  # opcodes by which a pickle numbers a value for later reference
_DTYPES = ("float", "bfloat", "int", "uint", "bool", "complex")


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # The unpickler calls this for each class that a pickle names, before importing it.
        is_dtype = module == "torch" and name.startswith(_DTYPES)
        if (module, name) not in _SAFE and not is_dtype:
            raise pickle.UnpicklingError(f"a pickle that holds code ({module}.{name})")
        resolved = super().find_class(module, name)
        if is_dtype:
            import torch

            # `torch.float_power` begins like a dtype and is a function.
            if not isinstance(resolved, torch.dtype):
                raise pickle.UnpicklingError(f"a pickle that holds code ({module}.{name})")
        return resolved


def is_sharded(folder: str) -> bool:
    """Tells whether a checkpoint's weights are sharded."""
    return os.path.isfile(os.path.join(folder, WEIGHTS, METADATA))


def code_in_shards(folder: str) -> list[str]:
    """Returns a line for each pickle among a folder's shards that holds code or is unreadable; runs none of them."""
    problems = []
    for name in FOLDERS:
        path = os.path.join(folder, name)
        if not os.path.isfile(os.path.join(path, METADATA)):
            continue
        # Half a second or more, as the package is deferred: only where a checkpoint is in shards.
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        try:
            metadata = read_metadata(path)
        except DamagedError as error:
            problems.append(error.message.removesuffix("."))
            continue
        for index, info in metadata.storage_data.items():
            if not isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                continue
            # A pickle is an archive of its own, between the tensors' bytes in the same files.
            with open(os.path.join(path, info.relative_path), "rb") as file:
                file.seek(info.offset)
                if unsafe := _asked_for(io.BytesIO(file.read(info.length))):
                    problems.append(f"{name}/{info.relative_path}: a pickle that holds code ({unsafe}), {index.fqn}")
    return problems


def _asked_for(pickled: str | io.BytesIO) -> str:
    """Returns the names in a pickle that PyTorch's safe reader refuses."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        return ", ".join(get_unsafe_globals_in_checkpoint(pickled))
    except Exception as error:
        return f"unreadable, {type(error).__name__}"


def read_metadata(folder: str) -> Metadata:
    """Reads the index of a folder of shards; `DamagedError` if it names unsafe classes or files elsewhere."""
    import pickletools

    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with open(os.path.join(folder, METADATA), "rb") as file:
            data = file.read()
        # The unpickler allocates for the highest memo number: a small file could otherwise ask for all memory.
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _MEMO and (argument or 0) > len(data):
                raise pickle.UnpicklingError(f"it has a value of number {argument:,}, and {len(data):,} bytes")
        metadata = _SafeUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it is {type(metadata).__name__}")
        for info in metadata.storage_data.values():
            _require_here(folder, info)
    except Exception as error:
        shown = os.path.join(os.path.basename(folder), METADATA)
        raise DamagedError(f"{shown} cannot be read as a list of shards: {error}.") from None
    return metadata


def is_unused(folder: str) -> bool:
    """Tells whether a sharded optimizer has no state: before its first step, or by its kind."""
    metadata = read_metadata(os.path.join(folder, OPTIMIZER))
    return not any(".state." in name for name in metadata.state_dict_metadata)


def _require_here(folder: str, info: Any) -> None:
    """Raises `ValueError` if a piece is in no file of the folder, or was encoded by an unknown extension."""
    name, end = info.relative_path, info.offset + info.length
    if name != os.path.basename(name) or not name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a file of its folder")
    if info.offset < 0 or info.length < 0 or end > os.path.getsize(os.path.join(folder, name)):
        raise ValueError(f"{name} has no byte {end}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is encoded by {info.transform_descriptors}")


def as_whole(folder: str, scratch: str) -> str:
    """Returns a folder that `from_pretrained` reads: the checkpoint's own, or a merged copy of a sharded one."""
    if not is_sharded(folder):
        return folder
    target = os.path.join(scratch, "merged")
    if not os.path.isdir(target):
        merge(folder, target)
    return target


def merge(folder: str, target: str, *, shard_size: str = SHARD_SIZE) -> list[str]:
    """Writes a sharded checkpoint's model as safetensors, with configuration and tokenizer, and returns the file names.

    Memory holds one file of the result at a time, or the largest tensor. `DamagedError` if a tensor's piece is missing.
    """
    import torch
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    entries = tensors(folder)
    is_adapter = os.path.isfile(os.path.join(folder, ADAPTER))  # one file, whatever its size: PEFT reads no other
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: entry.size.numel() * entry.properties.dtype.itemsize,
        filename_pattern=f"{'adapter_' if is_adapter else ''}model{{suffix}}.safetensors",
        max_shard_size=sys.maxsize if is_adapter else shard_size,
    )
    os.makedirs(target)
    for file, names in split.filename_to_tensors.items():
        loaded = {
            PREFIX + name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names
        }
        fill(os.path.join(folder, WEIGHTS), loaded)
        whole = {name.removeprefix(PREFIX): tensor for name, tensor in loaded.items()}
        save_file(whole, os.path.join(target, file), metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        with open(os.path.join(target, "model.safetensors.index.json"), "w", encoding="utf-8") as document:
            json.dump(index, document, indent=1, sort_keys=True)
    # Configuration, tokenizer and templates: the small files that are neither pickles nor of training.
    for name in sorted(os.listdir(folder)):
        if name.endswith((".json", ".jinja", ".model", ".txt", ".py")) and name != "trainer_state.json":
            shutil.copyfile(os.path.join(folder, name), os.path.join(target, name))
    return list(split.filename_to_tensors)


def tensors(folder: str) -> dict[str, TensorStorageMetadata]:
    """Returns the entries of a sharded checkpoint's weights by name; `DamagedError` if pieces are missing."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = {}
    for name, entry in read_metadata(os.path.join(folder, WEIGHTS)).state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        pieces = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if pieces != entry.size.numel():
            raise DamagedError(f"{name}: its pieces have {pieces} numbers, the whole {entry.size.numel()}.")
        entries[name.removeprefix(PREFIX)] = entry
    return entries


def fill(folder: str, state: dict[str, Any]) -> None:
    """Restores a state of whole tensors and plain values in place from the shards of all processes.

    The caller has run `code_in` on the folder: torch unpickles the plain values unchecked.
    """
    import torch.distributed.checkpoint as dcp

    # torch's own reader would unpickle `.metadata` unchecked.
    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return read_metadata(folder)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # warns of no_dist
        dcp.load(state, storage_reader=Reader(folder), no_dist=True)


def code_in(folder: str) -> list[str]:
    """Returns a line for each pickle in a folder that holds code or is unreadable; runs none of them."""
    from transformers.trainer_pt_utils import safe_globals

    problems = []
    for name in sorted(os.listdir(folder)):
        if name.endswith(SUFFIXES):
            with safe_globals():
                unsafe = _asked_for(os.path.join(folder, name))
            if unsafe:
                problems.append(f"{name}: a pickle that holds code ({unsafe})")
    return problems + code_in_shards(folder)


def may_be_pickle(name: str) -> bool:
    """Tells by name whether a checkpoint's file is or contains a pickle."""
    return name.endswith(SUFFIXES) or name.partition("/")[0] in FOLDERS
