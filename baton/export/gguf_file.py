"""GGUF files for llama.cpp, one per type of weights (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import UserError
from baton.export.exportable import GGUF_NAMES
from baton.models import vocabulary

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Array = Any
Layout = Callable[[Array], Array]

ACTIVATIONS = {"gpt2": ("gelu_new",), "gemma2": ("gelu_pytorch_tanh",), "gemma3": ("gelu_pytorch_tanh",)}
"""Activation functions that llama.cpp computes, where not SiLU."""
GEMMA = ("gemma2", "gemma3")
GEMMA3_PATTERN = 6  # in llama.cpp every sixth layer of Gemma 3 has full attention, always
GEMMA3_LOCAL_BASE = 10_000.0  # in llama.cpp the other layers' base of position embeddings, always

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_GPT2: "gpt-2", _MODERN % r"\p{N}{1,3}": "llama-bpe", _MODERN % r"\p{N}": "qwen2"}
"""How text is split before it is encoded → the name under which llama.cpp knows that."""
GENERATION_TAG = re.compile(r"{%(-?)\s*(?:end)?generation\s*(-?)%}")  # tag that only Transformers knows
LOWEST_SCORE = -1e6  # of a token that no merge makes


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str, path: str, kind: str, **about: str
) -> dict[str, str]:
    """Writes one file and returns the SHA-256 of each quantized tensor by name.

    `folder` has the tokenizer's files; `kind` is the type of the weights, such as `q8_0`.
    """
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, GGUF_NAMES[model.config.model_type])
    writer.add_name(about["name"])
    if about.get("license"):
        writer.add_license(about["license"])
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_settings(writer, model.config)
    add_vocabulary(writer, tokenizer, folder, model.config.vocab_size)
    weights = list(model_tensors(model))
    floats = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    for weight in weights:
        values = weight.read()
        used = _type(weight.name, values, kind)
        shape = values.shape if used in floats else gguf.quant_shape_to_byte_shape(values.shape, used)
        dtype = np.dtype(floats.get(used, np.uint8))
        writer.add_tensor_info(weight.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    hashes = {}
    for weight in weights:  # read a second time, so that at most one is in memory twice
        values = weight.read()
        data = _quantized(values, _type(weight.name, values, kind))
        writer.write_tensor_data(data)
        hashes[weight.name] = hashlib.sha256(data.tobytes()).hexdigest()
    writer.close()
    return hashes


def dequantized(model: PreTrainedModel, kind: str) -> Any:
    """Returns a float32 copy of a model with the weights that a file of a type holds."""
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


def _quantized(values: Array, used: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    import gguf
    import numpy as np

    data: np.ndarray[Any, Any] = np.ascontiguousarray(gguf.quantize(np.ascontiguousarray(values), used))
    return data


def _type(name: str, values: Array, kind: str) -> GGMLQuantizationType:
    """Returns a tensor's type: vectors and positions in 32 bits, rows without whole blocks in 16."""
    import gguf

    asked = gguf.GGMLQuantizationType[kind.upper()]
    if values.ndim == 1 or name == "position_embd.weight":
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[asked]
    return asked if values.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def add_settings(writer: GGUFWriter, config: Any) -> None:
    name = GGUF_NAMES[config.model_type]
    _require_computable(config, name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if name == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    context, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    if name in ("llama", "qwen2", "qwen3") and window and getattr(config, "use_sliding_window", True):
        context = min(context, window)  # llama.cpp knows no sliding window of Mistral: it ends where that would begin
    writer.add_context_length(int(context))
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
    """Returns a configuration as plain values, with the model type that Transformers reads the file as."""
    settings: dict[str, Any] = config.to_dict()
    if config.model_type == "mistral":  # where it is no other than Llama
        settings["model_type"] = "llama"
    return settings


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_settings(config: Any) -> dict[str, Any]:
    """Returns the rotary embedding's settings, of layers with full attention where there are two kinds."""
    settings: dict[str, Any] = config.rope_parameters
    return settings.get("full_attention", settings)


def _require_computable(config: Any, name: str) -> None:
    is_gpt2 = name == "gpt2"
    activation = (
        config.activation_function if is_gpt2 else getattr(config, "hidden_activation", None) or config.hidden_act
    )
    allowed = ACTIVATIONS.get(name, ("silu",))
    problems = [] if activation in allowed else [f"the activation {activation!r}, not {allowed[0]!r}"]
    if not is_gpt2 and rope_settings(config)["rope_type"] not in ("default", "linear", "llama3"):
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


def add_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, folder: str, vocab_size: int) -> None:
    """Writes the vocabulary of byte-level BPE, or of SentencePiece's BPE with single bytes to fall back on."""
    import gguf

    file = Path(folder) / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model": {"type": "without file"}}
    has_pieces = document["model"].get("byte_fallback", False)
    if document["model"]["type"] != "BPE":
        raise UserError(
            f"export.formats: gguf holds tokenizers of type BPE, not {document['model']['type']}.",
            remedy="Leave gguf out.",
        )
    writer.add_tokenizer_model("llama" if has_pieces else "gpt2")
    writer.add_tokenizer_pre("default" if has_pieces else _split_name(document))
    texts, kinds = _tokens(document, vocab_size)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if has_pieces:
        writer.add_token_scores(_scores(document, texts))
        writer.add_add_space_prefix(tokenizer.tokenize("a")[0].startswith("▁"))
    special = gguf.SpecialVocab(folder, load_merges=not has_pieces, n_vocab=vocab_size)
    ids = tokenizer("a")["input_ids"]
    special.add_special_token = {"bos": ids[0] == tokenizer.bos_token_id, "eos": ids[-1] == tokenizer.eos_token_id}
    if isinstance(special.chat_template, str):
        special.chat_template = GENERATION_TAG.sub(r"{#\1 \2#}", special.chat_template)
    special.add_to_gguf(writer, quiet=True)
    if (end := vocabulary.end_of_turn(tokenizer)) is not None:
        writer.add_eot_token_id(end)


def _split_name(document: dict[str, Any]) -> str:
    """Returns llama.cpp's name for a byte-level tokenizer's way to split text."""
    pre_tokenizer = document.get("pre_tokenizer") or {}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True) and not parts[0]["add_prefix_space"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        name = SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if name and parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]:
            return name
    raise UserError(
        "export.formats: gguf knows the ways in which GPT-2, Llama 3, Qwen 2 and SmolLM split text, not this "
        f"tokenizer's: {json.dumps(pre_tokenizer, ensure_ascii=False)[:200]}.",
        remedy="Leave gguf out.",
    )


def _tokens(document: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    from gguf import TokenType

    texts = [f"[PAD{number}]" for number in range(vocab_size)]  # rows of the embedding may outnumber tokens
    kinds = [int(TokenType.UNUSED)] * vocab_size
    unknown = document["model"].get("unk_token")
    for text, number in document["model"]["vocab"].items():
        texts[number] = text
        is_byte = document["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", text)
        kinds[number] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in document.get("added_tokens", []):
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if token["content"] == unknown:
            kinds[token["id"]] = TokenType.UNKNOWN
    return texts, kinds


def _scores(document: dict[str, Any], texts: list[str]) -> list[float]:
    """Returns a score per token: SentencePiece makes the highest first, so earlier merges score higher."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(document["model"]["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(rank))
    return [scores.get(text, LOWEST_SCORE) for text in texts]


@dataclass(frozen=True)
class TensorSource:
    name: str  # in the file
    source: str | None  # in the model; None for a computed tensor
    read: Callable[[], Array]  # values in float32, in the file's layout
    back: Layout  # brings such values into the model's layout


def model_tensors(model: Any) -> Iterator[TensorSource]:
    """Yields a model's tensors, a shared embedding once."""
    import gguf

    config = model.config
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[GGUF_NAMES[config.model_type]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    if config.model_type != "gpt2" and rope_settings(config)["rope_type"] == "llama3":
        yield TensorSource("rope_freqs.weight", None, functools.partial(_rope_factors, config), _unchanged)
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"export.formats: gguf has no name for the weights {source!r} of {config.model_type}.")
        there, back = _layouts(config, source)
        yield TensorSource(name, source, functools.partial(_values, tensor, there), back)


def _values(tensor: Any, there: Layout) -> Array:
    return there(tensor.float().numpy())


def _rope_factors(config: Any) -> np.ndarray[Any, Any]:
    """Returns Llama 3's divisor of each frequency, of shape (head size / 2,): base^(-2i/d) over Transformers' own."""
    import numpy as np
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = head_size(config)
    plain = 1.0 / rope_settings(config)["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    return (plain / scaled.double().numpy()).astype(np.float32)


def _layouts(config: Any, source: str) -> tuple[Layout, Layout]:
    import numpy as np

    kind = GGUF_NAMES[config.model_type]
    if kind == "llama" and ".q_proj." in source:
        return _rotary(config.num_attention_heads)
    if kind == "llama" and ".k_proj." in source:
        return _rotary(config.num_key_value_heads)
    if kind == "gpt2" and source.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
        return (lambda values: np.ascontiguousarray(values.T),) * 2  # GPT-2's layers hold (in, out)
    if kind in GEMMA and source.endswith("norm.weight"):
        return lambda values: values + 1, lambda values: values - 1  # Transformers multiplies by 1 + weight
    return _unchanged, _unchanged


def _unchanged(values: Array) -> Array:
    return values


def _rotary(num_heads: int) -> tuple[Layout, Layout]:
    """Returns the orders of a projection's rows, there and back."""
    # Transformers rotates row i of a head with row i + d/2, llama.cpp row 2i with 2i + 1.
    return (
        lambda values: values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape),
        lambda values: values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape),
    )
