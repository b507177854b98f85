"""The model as GGUF files for llama.cpp, written with its `gguf` library; one for each type of weights."""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

from baton.components.export import gguf_settings, gguf_tensors, gguf_vocabulary
from baton.components.export.gguf_tensors import Weight
from baton.components.shared.models.exportable import GGUF_NAMES

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE_TYPES = {"f32": "ALL_F32"}
"""Names of the library for a file's type, where not `MOSTLY_…`."""


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str, path: str, kind: str, **about: str
) -> dict[str, str]:
    """Writes one file.

    Args:
        model: The whole model.
        tokenizer: Its tokenizer.
        folder: Where the tokenizer's files are.
        path: File to write.
        kind: Type of the weights, such as `q8_0`; vectors and position embeddings stay in float32.
        about: `name` of the model, and its `license` where known.

    Returns:
        SHA-256 of each tensor as the library's quantizer yields it, by name.

    Raises:
        UserError: GGUF cannot hold the model or its tokenizer.
    """
    import gguf

    writer = gguf.GGUFWriter(path, GGUF_NAMES[model.config.model_type])
    writer.add_name(about["name"])
    if about.get("license"):
        writer.add_license(about["license"])
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES.get(kind, f"MOSTLY_{kind.upper()}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    gguf_settings.add(writer, model.config)
    gguf_vocabulary.add(writer, tokenizer, folder, model.config.vocab_size)
    weights = list(gguf_tensors.weights(model))
    for weight in weights:
        _announce(writer, weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    hashes = {}
    for weight in weights:  # read again, so that no more than one is in memory twice
        values = weight.read()
        data = _quantized(values, _type(weight.name, values, kind))
        writer.write_tensor_data(data)
        hashes[weight.name] = hashlib.sha256(data.tobytes()).hexdigest()
    writer.close()
    return hashes


def _announce(writer: GGUFWriter, weight: Weight, kind: str) -> None:
    """Adds a tensor's name, shape and type to the head of the file."""
    import gguf
    import numpy as np

    values = weight.read()
    used = _type(weight.name, values, kind)
    floats = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    shape = values.shape if used in floats else gguf.quant_shape_to_byte_shape(values.shape, used)
    dtype = np.dtype(floats.get(used, np.uint8))
    writer.add_tensor_info(weight.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=used)


def dequantized(model: PreTrainedModel, kind: str) -> Any:
    """Returns a copy of a model in float32 with the weights that a file of a type holds."""
    import gguf
    import torch

    copied = copy.deepcopy(model).float()
    state = copied.state_dict()
    with torch.no_grad():
        for weight in gguf_tensors.weights(model):
            if weight.source is None:
                continue
            values = weight.read()
            used = _type(weight.name, values, kind)
            read = gguf.dequantize(_quantized(values, used), used).reshape(values.shape)
            state[weight.source].copy_(torch.from_numpy(weight.back(read).copy()))
    return copied


def _quantized(values: np.ndarray[Any, Any], used: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    import gguf
    import numpy as np

    data: np.ndarray[Any, Any] = np.ascontiguousarray(gguf.quantize(np.ascontiguousarray(values), used))
    return data


def _type(name: str, values: np.ndarray[Any, Any], kind: str) -> GGMLQuantizationType:
    """Returns the type of one tensor: rows that are no whole number of blocks are held in 16 bits."""
    import gguf

    asked = gguf.GGMLQuantizationType[kind.upper()]
    if values.ndim == 1 or name == "position_embd.weight":
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[asked]
    return asked if values.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
