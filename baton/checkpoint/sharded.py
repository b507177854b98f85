"""Sharded checkpoints of FSDP: read without running pickled code, merged into one model, and searched.

    pytorch_model_fsdp_0/{.metadata, __0_0.distcp, …}    weights: what lies where, and a file for each process
    optimizer_0/{.metadata, __0_0.distcp, …}             the optimizer's state, in the same way

`.metadata` is a pickle, and so is every value beside the tensors; torch loads both unchecked. Here only classes of
numbers and names are loaded, and any other class is damage.
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
PREFIX = "model."
"""Accelerate saves the weights as one entry of this name."""
SHARD_SIZE = "5GB"
"""Largest file of a merged model, as in Transformers; memory holds one at a time."""
ADAPTER = "adapter_config.json"
"""What a checkpoint has that holds an adapter alone."""
SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
"""Names of files that PyTorch writes as pickles."""
_OF_METADATA = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_SAFE = {
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


class _SafeUnpickler(pickle.Unpickler):
    """Reads a pickle of harmless classes, and refuses any other."""

    def find_class(self, module: str, name: str) -> Any:
        # Called for each class that a pickle names, before it is imported.
        is_dtype = module == "torch" and name.startswith(_DTYPES)
        if (module, name) not in _SAFE and not is_dtype:
            raise pickle.UnpicklingError(f"a pickle that holds code ({module}.{name})")
        resolved = super().find_class(module, name)
        if is_dtype:
            import torch

            # `torch.float_power` begins like a type of numbers and is a function.
            if not isinstance(resolved, torch.dtype):
                raise pickle.UnpicklingError(f"a pickle that holds code ({module}.{name})")
        return resolved


def is_sharded(folder: str) -> bool:
    """Tells whether a checkpoint's weights are in shards."""
    return os.path.isfile(os.path.join(folder, WEIGHTS, METADATA))


def code_in_shards(folder: str) -> list[str]:
    """Returns a line for each pickle of a sharded checkpoint that would run code when read, or is none.

    Nothing of it is run here. A folder without shards has no lines.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    problems = []
    for name in FOLDERS:
        path = os.path.join(folder, name)
        if not os.path.isfile(os.path.join(path, METADATA)):
            continue
        try:
            metadata = read_metadata(path)
        except DamagedError as error:
            problems.append(error.message.removesuffix("."))
            continue
        for index, info in metadata.storage_data.items():
            if not isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                continue
            # It lies between the tensors' bytes in the same files, an archive of its own.
            with open(os.path.join(path, info.relative_path), "rb") as file:
                file.seek(info.offset)
                if unsafe := _asked_for(io.BytesIO(file.read(info.length))):
                    problems.append(f"{name}/{info.relative_path}: a pickle that holds code ({unsafe}), {index.fqn}")
    return problems


def _asked_for(pickled: str | io.BytesIO) -> str:
    """Returns what a pickle asks for that PyTorch's safe reader refuses, empty where it asks for nothing."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        return ", ".join(get_unsafe_globals_in_checkpoint(pickled))
    except Exception as error:
        return f"unreadable, {type(error).__name__}"


def read_metadata(folder: str) -> Metadata:
    """Reads what lies where in a folder of shards.

    Raises:
        DamagedError: it asks for more than such a document needs, names files elsewhere, or is none.
    """
    import pickletools

    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with open(os.path.join(folder, METADATA), "rb") as file:
            data = file.read()
        # Its reader makes room for the highest number by which a value is named again.
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
    """Tells whether the optimizer of a checkpoint in shards keeps nothing: it has made no step, or needs no memory."""
    metadata = read_metadata(os.path.join(folder, OPTIMIZER))
    return not any(".state." in name for name in metadata.state_dict_metadata)


def _require_here(folder: str, info: Any) -> None:
    """Raises `ValueError` where a piece lies in no file of the folder, or went through an unknown extension."""
    name, end = info.relative_path, info.offset + info.length
    if name != os.path.basename(name) or not name or name in (".", ".."):
        raise ValueError(f"{name!r} is no file beside it")
    if info.offset < 0 or info.length < 0 or end > os.path.getsize(os.path.join(folder, name)):
        raise ValueError(f"{name} has no byte {end}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is encoded by {info.transform_descriptors}")


def as_whole(folder: str, scratch: str) -> str:
    """Returns a folder that `from_pretrained` reads: the checkpoint's own, or a merged copy where it is in shards."""
    if not is_sharded(folder):
        return folder
    target = os.path.join(scratch, "merged")
    if not os.path.isdir(target):
        merge(folder, target)
    return target


def merge(folder: str, target: str, *, shard_size: str = SHARD_SIZE) -> list[str]:
    """Writes the model of a sharded checkpoint as safetensors, with its configuration and tokenizer.

    Memory holds one file of the result at a time, or the largest tensor where that is larger. An adapter is one file,
    whatever its size: PEFT reads no other.

    Args:
        folder: Local files of the checkpoint, every byte checked.
        target: Folder to write to; made where there is none.
        shard_size: Largest file, such as `5GB`.

    Returns:
        Names of the files with weights.

    Raises:
        DamagedError: a piece of a tensor is missing, or a pickle holds code.
    """
    import torch
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    entries = tensors(folder)
    is_adapter = os.path.isfile(os.path.join(folder, ADAPTER))
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: entry.size.numel() * entry.properties.dtype.itemsize,
        filename_pattern=f"{'adapter_' if is_adapter else ''}model{{suffix}}.safetensors",
        max_shard_size=sys.maxsize if is_adapter else shard_size,
    )
    os.makedirs(target, exist_ok=True)
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
    """Returns what a sharded checkpoint holds of the model, by names of weights.

    Raises:
        DamagedError: pieces of one are missing.
    """
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
    """Restores a state, in place, from the pieces of all processes.

    Args:
        folder: The folder of shards, whose values beside the tensors `code_in` has looked through.
        state: Nested containers of tensors, each whole, and plain values.
    """
    import torch.distributed.checkpoint as dcp

    # torch's own would unpickle `.metadata` whatever it asks for.
    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return read_metadata(folder)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what no_dist says
        dcp.load(state, storage_reader=Reader(folder), no_dist=True)


def code_in(folder: str) -> list[str]:
    """Returns a line for each pickle in a folder that would run code when read, or is none.

    Nothing of it is run here: PyTorch lists what a file asks for, against what its safe reader allows.
    """
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
    """Tells by a file's name in a checkpoint whether it is a pickle, or has some in it."""
    return name.endswith(SUFFIXES) or name.partition("/")[0] in FOLDERS
