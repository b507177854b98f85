"""GGUF files for llama.cpp: a model's settings and tensors by GGUF's names, one file per type of weights.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` library writes the file.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.errors import UserError
from baton.export import gguf_vocabulary
from baton.export.exportable import GGUF_NAMES

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# --- A model's settings as GGUF knows them. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.


ACTIVATIONS = {"gpt2": ("gelu_new",), "gemma2": ("gelu_pytorch_tanh",), "gemma3": ("gelu_pytorch_tanh",)}
"""Activation functions that llama.cpp computes, where not SiLU."""

GEMMA = ("gemma2", "gemma3")
GEMMA3_PATTERN = 6
"""Of so many layers of Gemma 3 the last sees everything, in llama.cpp always."""
GEMMA3_LOCAL_BASE = 10_000.0
"""Base of the position embeddings in the other layers, in llama.cpp always."""


def add_settings(writer: GGUFWriter, config: Any) -> None:
    """Writes a model's settings.

    Args:
        writer: Of the file.
        config: Transformers' configuration of the model.

    Raises:
        UserError: llama.cpp does not compute what a setting asks for.
    """
    name = GGUF_NAMES[config.model_type]
    _require(config, name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if name == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_context_length(_context(config, name))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    size = head_size(config)
    writer.add_key_length(size)
    writer.add_value_length(size)
    rope = rope_settings(config)
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if name in (*GEMMA, "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def plain_config(config: Any) -> dict[str, Any]:
    """Returns a configuration as plain values, of the model type that Transformers reads the file as."""
    settings: dict[str, Any] = config.to_dict()
    if config.model_type == "mistral":  # where it is no other than Llama
        settings["model_type"] = "llama"
    return settings


def head_size(config: Any) -> int:
    """Returns the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_settings(config: Any) -> dict[str, Any]:
    """Returns the settings of the rotary position embedding, of layers that see everything where there are two."""
    settings: dict[str, Any] = config.rope_parameters
    return settings.get("full_attention", settings)


def rope_factors(config: Any) -> np.ndarray[Any, Any] | None:
    """Returns by what Llama 3 divides each frequency, of shape (head size / 2,), None for other models.

    The factor is how much Transformers' own frequencies lie below the unscaled ones, base^(-2i/d).
    """
    import numpy as np

    if config.model_type == "gpt2" or rope_settings(config)["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = head_size(config)
    plain = 1.0 / rope_settings(config)["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    return (plain / scaled.double().numpy()).astype(np.float32)


def _context(config: Any, name: str) -> int:
    """Returns the longest context; llama.cpp knows no sliding window of Mistral, so it ends where that would begin."""
    window = getattr(config, "sliding_window", None)
    if name in ("llama", "qwen2", "qwen3") and window and getattr(config, "use_sliding_window", True):
        return int(min(config.max_position_embeddings, window))
    return int(config.max_position_embeddings)


def _require(config: Any, name: str) -> None:
    activation = config.activation_function if name == "gpt2" else _activation(config)
    allowed = ACTIVATIONS.get(name, ("silu",))
    problems = [] if activation in allowed else [f"the activation {activation!r}, not {allowed[0]!r}"]
    if name != "gpt2" and rope_settings(config)["rope_type"] not in ("default", "linear", "llama3"):
        problems.append(f"position embeddings of type {rope_settings(config)['rope_type']!r}")
    if name != "llama" and getattr(config, "mlp_bias", False):
        problems.append("biases in the feed-forward layers")
    if name in GEMMA and config.query_pre_attn_scalar != head_size(config):
        problems.append(f"query_pre_attn_scalar {config.query_pre_attn_scalar}, not the size of a head")
    if name == "gemma3" and any(
        (kind == "full_attention") == bool(layer % GEMMA3_PATTERN) for layer, kind in enumerate(config.layer_types, 1)
    ):
        problems.append(f"layers that see everything at other places than every {GEMMA3_PATTERN}th")
    if name == "gemma3" and config.rope_parameters["sliding_attention"]["rope_theta"] != GEMMA3_LOCAL_BASE:
        problems.append(f"layers with a window that do not turn by the base {GEMMA3_LOCAL_BASE}")
    if problems:
        raise UserError(
            f"export.formats: gguf cannot hold this {config.model_type} model: it has {'; '.join(problems)}.",
            remedy="Leave gguf out.",
        )


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


# --- A model's weights under the names and in the layout of GGUF, and back.


Array = Any
Turn = Callable[[Array], Array]

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Weight:
    """One tensor of the file.

    Attributes:
        name: In the file.
        source: In the model; None for one that is computed.
        read: Returns its values in float32, in the file's layout.
        back: Turns such values into the model's layout.
    """

    name: str
    source: str | None
    read: Callable[[], np.ndarray[Any, Any]]
    back: Turn


def model_tensors(model: Any) -> Iterator[Weight]:
    """Yields the tensors of a model, none of them twice where the output shares the embedding's.

    Args:
        model: A causal language model of Transformers.

    Raises:
        UserError: GGUF has no name for one of them.
    """
    import gguf

    config = model.config
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[GGUF_NAMES[config.model_type]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    factors = rope_factors(config)
    if factors is not None:
        yield Weight(ROPE_FACTORS, None, lambda: factors, lambda values: values)
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"export.formats: gguf has no name for the weights {source!r} of {config.model_type}.")
        there, back = _turns(config, source)
        yield Weight(name, source, functools.partial(_values, tensor, there), back)


def _values(tensor: Any, there: Turn) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = there(tensor.float().numpy())
    return values


def _turns(config: Any, source: str) -> tuple[Turn, Turn]:
    """Returns how a tensor's layout changes, there and back."""
    kind = GGUF_NAMES[config.model_type]
    if kind == "llama" and ".q_proj." in source:
        return _rotary(config.num_attention_heads)
    if kind == "llama" and ".k_proj." in source:
        return _rotary(config.num_key_value_heads)
    if kind == "gpt2" and source.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
        return _transposed, _transposed  # GPT-2's layers hold (in, out)
    if kind in GEMMA and source.endswith("norm.weight"):
        return lambda values: values + 1, lambda values: values - 1  # Transformers multiplies by 1 + weight
    return lambda values: values, lambda values: values


def _transposed(values: Array) -> Array:
    import numpy as np

    return np.ascontiguousarray(values.T)


def _rotary(num_heads: int) -> tuple[Turn, Turn]:
    """Returns how the rows of a projection are put in order, there and back.

    Transformers rotates row i of a head with row i + d/2, llama.cpp row 2i with 2i + 1.
    """

    def there(values: Array) -> Array:
        halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)

    def back(values: Array) -> Array:
        pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    return there, back


# --- The model as GGUF files for llama.cpp, written with its `gguf` library; one for each type of weights.


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
    add_settings(writer, model.config)
    gguf_vocabulary.add(writer, tokenizer, folder, model.config.vocab_size)
    weights = list(model_tensors(model))
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
        for weight in model_tensors(model):
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
