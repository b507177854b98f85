"""Export formats: a writer and a check for each, listed in `FORMATS`.

GGUF is written for llama.cpp, one file per type of weights:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import tarfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
import yaml

from baton.checkpoint.store import TRAINING_FILES
from baton.errors import BatonError, UserError
from baton.export import exportable, parity
from baton.export.source import ExportSource
from baton.models import vocabulary
from baton.recipe.evaluation import ONNX
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import ExportCheck, ModelMeta
from baton.store import bundle
from baton.store.manifest import Manifest

if TYPE_CHECKING:
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


def write_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str, path: str, kind: str, **about: str
) -> dict[str, str]:
    """Writes one file and returns the SHA-256 of each quantized tensor by name.

    `folder` has the tokenizer's files; `kind` is the type of the weights, such as `q8_0`.
    """
    import gguf

    writer = gguf.GGUFWriter(path, exportable.GGUF_NAMES[model.config.model_type])
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
        used = _gguf_type(weight.name, values, kind)
        shape = values.shape if used in floats else gguf.quant_shape_to_byte_shape(values.shape, used)
        dtype = np.dtype(floats.get(used, np.uint8))
        writer.add_tensor_info(weight.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    hashes = {}
    for weight in weights:  # read a second time, so that at most one is in memory twice
        values = weight.read()
        data = _quantized(values, _gguf_type(weight.name, values, kind))
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
            used = _gguf_type(weight.name, values, kind)
            read = gguf.dequantize(_quantized(values, used), used).reshape(values.shape)
            state[weight.source].copy_(torch.from_numpy(weight.back(read).copy()))
    return copied


def _quantized(values: Array, used: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    import gguf

    data: np.ndarray[Any, Any] = np.ascontiguousarray(gguf.quantize(np.ascontiguousarray(values), used))
    return data


def _gguf_type(name: str, values: Array, kind: str) -> GGMLQuantizationType:
    """Returns a tensor's type: vectors and positions in 32 bits, rows without whole blocks in 16."""
    import gguf

    asked = gguf.GGMLQuantizationType[kind.upper()]
    if values.ndim == 1 or name == "position_embd.weight":
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[asked]
    return asked if values.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def add_settings(writer: GGUFWriter, config: Any) -> None:
    name = exportable.GGUF_NAMES[config.model_type]
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
    texts, kinds = _gguf_tokens(document, vocab_size)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if has_pieces:
        writer.add_token_scores(_gguf_scores(document, texts))
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


def _gguf_tokens(document: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
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


def _gguf_scores(document: dict[str, Any], texts: list[str]) -> list[float]:
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
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[exportable.GGUF_NAMES[config.model_type]]
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
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = head_size(config)
    plain = 1.0 / rope_settings(config)["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    return (plain / scaled.double().numpy()).astype(np.float32)


def _layouts(config: Any, source: str) -> tuple[Layout, Layout]:

    kind = exportable.GGUF_NAMES[config.model_type]
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


@dataclass(frozen=True)
class CommittedExport:
    uri: str
    manifest: Manifest
    meta: ModelMeta
    folder: Callable[[], str]  # fetches its files and returns their local folder


@dataclass(frozen=True)
class ExportDraft:
    """An export that is written and not yet checked."""

    source: ExportSource
    target: str
    main: CommittedExport | None = None  # None while the main export itself is made
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)  # GGUF file → tensor → SHA-256

    def require_main(self) -> CommittedExport:
        assert self.main
        return self.main


SIZE_UNITS = {"MB": 10**6, "GB": 10**9}


def _write_safetensors(draft: ExportDraft) -> None:
    """Writes the whole model; an unchanged checkpoint's own files are copied."""
    source, spec = draft.source, draft.source.recipe.export
    is_changed = source.recipe.adapter or spec.dtype not in (None, source.recipe.model.dtype) or _has_experts(source)
    files = [f"{source.folder}/{name}" for name in os.listdir(source.folder) if name.endswith(".safetensors")]
    limit = int(spec.shard_size[:-2]) * SIZE_UNITS[spec.shard_size[-2:]]
    if is_changed or max(map(os.path.getsize, files), default=0) > limit:
        source.merged.save_pretrained(draft.target, max_shard_size=spec.shard_size)
        source.tokenizer.save_pretrained(draft.target)
    else:
        _copy_model(draft)


def _has_experts(source: ExportSource) -> bool:
    """Tells whether the model is a mixture of experts, whose checkpoint names weights as in memory."""
    from transformers import AutoConfig

    if not os.path.isfile(f"{source.folder}/config.json"):
        return False
    runs_code = source.recipe.model.trust_remote_code
    config: Any = AutoConfig.from_pretrained(source.folder, trust_remote_code=runs_code).get_text_config()
    return any(hasattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def _copy_model(draft: ExportDraft) -> None:
    """Copies the model's or adapter's files of a checkpoint."""
    folder = draft.source.folder
    for name in sorted(os.listdir(folder)):
        if not TRAINING_FILES.match(name) and name != "README.md" and os.path.isfile(f"{folder}/{name}"):
            shutil.copyfile(f"{folder}/{name}", f"{draft.target}/{name}")


def _compare_weights(
    export_format: str, draft: ExportDraft, reference: parity.Reference, **request: Any
) -> ExportCheck:
    """Reads back an export with unchanged weights, and compares weights, logits and tokens."""
    reading = parity.read(export_format, draft.target, draft.source.inputs, reference, **request)
    parity.require_weights(f"the {export_format} export", reading.notes["weights"], reference.weights)
    return parity.compare(export_format, reading, reference, reference.rounding)


def _check_safetensors(draft: ExportDraft, export_format: str = "safetensors") -> ExportCheck:
    reference = draft.source.merged_reference
    return draft.source.compare_with_trained(_compare_weights(export_format, draft, reference), reference)


def _check_adapter(draft: ExportDraft) -> ExportCheck:
    source = draft.source
    request = {"base": source.base, "dtype": source.recipe.model.dtype}
    return _compare_weights("adapter", draft, source.trained_reference, **request)


def _write_gguf(draft: ExportDraft) -> None:
    source = draft.source
    exportable.check(source.recipe, source.merged.config.model_type)
    tokenizer_folder = f"{source.scratch}/tokenizer"
    source.tokenizer.save_pretrained(tokenizer_folder)
    about = {"name": source.recipe.name, "license": source.licence or ""}
    for kind in source.recipe.export.gguf.types:
        name = f"{source.recipe.name}-{kind}.gguf"
        path = f"{draft.target}/{name}"
        draft.hashes[name] = write_gguf(source.merged, source.tokenizer, tokenizer_folder, path, kind, **about)


def _check_gguf(draft: ExportDraft) -> ExportCheck:
    source = draft.source
    config = plain_config(source.merged.config)
    texts = [source.tokenizer(text)["input_ids"] for text in source.inputs.texts]
    files = {}
    for kind, (name, hashes) in zip(source.recipe.export.gguf.types, draft.hashes.items(), strict=True):
        reference = parity.make_reference(dequantized(source.merged, kind), source.inputs)
        reading = parity.read("gguf", draft.target, source.inputs, reference, file=name, config=config)
        parity.require_weights(name, reading.notes["tensors"], hashes)
        parity.require_weights(f"{name}, once loaded,", reading.notes["weights"], reference.weights)
        finding = parity.compare("gguf", reading, reference, reference.rounding)
        engine = parity.check_llama_cpp(name, reading, reference, texts, exact=kind == "f32")
        finding = finding.model_copy(update={"llama_cpp": engine}) if engine else finding
        files[name] = source.compare_with_trained(finding, reference)
    words = "; ".join(f"{name} {finding.words}" for name, finding in files.items())
    return ExportCheck(library=finding.library, files=files, words=words)


ONNX_FILE = "model.onnx"


def _write_onnx(draft: ExportDraft) -> None:
    source = draft.source
    save_onnx(source.in_float32(), source.tokenizer, source.recipe.export.onnx, draft.target)


def save_onnx(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: ONNX, target: str) -> None:
    """Writes a float32 graph (`input_ids`, `attention_mask` → `logits`) for ONNX Runtime, and the tokenizer."""
    import torch
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model.config.use_cache = False
    ids = torch.arange(2 * 8).reshape(2, 8) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0  # else the exporter takes the mask for one that can be left out
    settings: Any = OnnxConfig(dynamic=True, opset_version=spec.opset)
    with _quiet():
        exported = OnnxExporter().export(model, {"input_ids": ids, "attention_mask": mask}, config=settings)
        OnnxExporter.save_program(exported.program, f"{target}/{ONNX_FILE}")
    model.config.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    torch_log = logging.getLogger("torch.onnx")
    level = torch_log.level
    transformers.logging.set_verbosity_error()
    torch_log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        torch_log.setLevel(level)


def _check_onnx(draft: ExportDraft) -> ExportCheck:
    source = draft.source
    reference = parity.make_reference(source.in_float32(), source.inputs)
    reading = parity.read("onnx", draft.target, source.inputs, reference)
    return source.compare_with_trained(parity.compare("onnx", reading, reference, parity.TOLERANCE), reference)


MLFLOW_PACKAGES = ("transformers", "torch", "accelerate")  # pinned to the versions of the check


def _write_mlflow(draft: ExportDraft) -> None:
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    source = draft.source
    os.rmdir(draft.target)  # MLflow makes it
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    texts = Schema([ColSpec(DataType.string)])
    labelled = Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")])
    mlflow.transformers.save_model(
        transformers_model={"model": source.merged, "tokenizer": source.tokenizer},
        path=draft.target,
        task="text-classification" if source.scores else "text-generation",
        signature=ModelSignature(inputs=texts, outputs=labelled if source.scores else texts),
        input_example=source.inputs.texts[:1],
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in MLFLOW_PACKAGES],
    )


MEDIA = "application/vnd.oci.image"
OCI_FOLDER = "models"


class BlobDescriptor(TypedDict):
    mediaType: str
    digest: str
    size: int
    annotations: NotRequired[dict[str, str]]


def _write_oci(draft: ExportDraft) -> None:
    run = draft.source.run
    labels = {"baton.run": run.name, "baton.run_uri": run.uri, "baton.digest": draft.source.digest}
    write_image_layout(draft.require_main().folder(), draft.target, tag=run.name, labels=labels)


def write_image_layout(source: str, target: str, *, tag: str, labels: dict[str, str]) -> None:
    """Writes a folder's files as an OCI image layout under /models, as KServe expects of `oci://`.

    https://github.com/opencontainers/image-spec/blob/main/image-layout.md. The same files give the same bytes. The
    image holds data alone and mounts as an image volume; older KServe's sidecar needs a shell (`FROM busybox`).
    """
    blobs = f"{target}/blobs/sha256"
    os.makedirs(blobs)

    def describe(content: Mapping[str, object], media: str) -> BlobDescriptor:
        data = _canonical_json(content)
        digest = hashlib.sha256(data).hexdigest()
        _write_bytes(f"{blobs}/{digest}", data)
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    names = sorted(os.listdir(source))
    large = [name for name in names if name.endswith(".safetensors")]
    # A layer for each file of weights, so that a registry and its clients keep unchanged ones.
    groups = [[name for name in names if name not in large], *([name] for name in large)]
    layers = [_write_layer(source, group, blobs) for group in groups if group]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},  # of tars not compressed
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA}.manifest.v1+json",
        "config": describe(config, f"{MEDIA}.config.v1+json"),
        "layers": layers,
    }
    entry = describe(manifest, f"{MEDIA}.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    index = {"schemaVersion": 2, "mediaType": f"{MEDIA}.index.v1+json", "manifests": [entry]}
    _write_bytes(f"{target}/index.json", _canonical_json(index))
    _write_bytes(f"{target}/oci-layout", _canonical_json({"imageLayoutVersion": "1.0.0"}))


def _canonical_json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _write_bytes(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _write_layer(source: str, names: list[str], blobs: str) -> BlobDescriptor:
    path = f"{blobs}/unfinished"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo(OCI_FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for name in names:
            entry = tarfile.TarInfo(f"{OCI_FOLDER}/{name}")  # owner root, time 0
            entry.size, entry.mode = os.path.getsize(f"{source}/{name}"), 0o644
            with open(f"{source}/{name}", "rb") as file:
                tar.addfile(entry, file)
    digest = bundle.file_sha256(path)
    os.replace(path, f"{blobs}/{digest}")
    return {
        "mediaType": f"{MEDIA}.layer.v1.tar",
        "digest": f"sha256:{digest}",
        "size": os.path.getsize(f"{blobs}/{digest}"),
    }


def _check_oci(draft: ExportDraft) -> ExportCheck:
    files = draft.require_main().manifest.files
    return check_image_layout(draft.target, {name: entry["sha256"] for name, entry in files.items()})


def check_image_layout(folder: str, expected: dict[str, str]) -> ExportCheck:
    """Reads a layout from its index down and compares every file of the model."""

    def checked(descriptor: BlobDescriptor) -> str:
        path = f"{folder}/blobs/{descriptor['digest'].replace(':', '/')}"
        if not os.path.isfile(path) or os.path.getsize(path) != descriptor["size"]:
            raise BatonError(
                f"the oci export's {descriptor['digest']} is missing or of another size; it does not count."
            )
        if f"sha256:{bundle.file_sha256(path)}" != descriptor["digest"]:
            raise BatonError(f"the oci export's {descriptor['digest']} has another digest; it does not count.")
        return path

    def document(path: str) -> Any:
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    manifest = document(checked(document(f"{folder}/index.json")["manifests"][0]))
    config = document(checked(manifest["config"]))
    if config["rootfs"]["diff_ids"] != [layer["digest"] for layer in manifest["layers"]]:
        raise BatonError("the oci export's configuration lists other layers than its manifest; it does not count.")
    digests: dict[str, str] = {}
    for layer in manifest["layers"]:
        with tarfile.open(checked(layer), "r:") as tar:
            for member in (member for member in tar if member.isfile()):
                content: Any = tar.extractfile(member)
                digests[member.name.removeprefix(f"{OCI_FOLDER}/")] = hashlib.file_digest(content, "sha256").hexdigest()
    if digests != expected:
        wrong = sorted(name for name in {*digests, *expected} if digests.get(name) != expected.get(name))
        raise BatonError(f"the oci export does not hold the model's {', '.join(wrong)}; it does not count.")
    return ExportCheck(library="tarfile", words=f"all digests and sizes, {len(digests)} files as in the model")


KSERVE_FILE = "inferenceservice.yaml"
MAX_LABEL = 63  # characters of a label's value
LABEL = re.compile(rf"[A-Za-z0-9]([\w.-]{{0,{MAX_LABEL - 2}}}[A-Za-z0-9])?")
SERVER_GIB = 4  # a server's own memory, in addition to 1.5 times the weights


def _write_kserve(draft: ExportDraft) -> None:
    source, main = draft.source, draft.require_main()
    uri = source.recipe.export.kserve.model_uri or main.uri
    about = {"run": source.run.name, "digest": source.digest}
    document = inference_service(source.recipe, model_uri=uri, size=main.manifest.bytes, **about)
    with open(f"{draft.target}/{KSERVE_FILE}", "w", encoding="utf-8") as file:
        yaml.safe_dump(document, file, sort_keys=False)


def inference_service(recipe: Recipe, *, model_uri: str, size: int, run: str, digest: str) -> dict[str, Any]:
    """Returns KServe's `InferenceService` for its Hugging Face runtime; `size` is the model's bytes."""
    spec = recipe.export.kserve
    gpus = recipe.resources.gpus if spec.gpus is None else spec.gpus
    name = spec.name or recipe.name
    arguments = [f"--model_name={name}"]
    if recipe.training.spec.scores:
        arguments.append("--task=sequence_classification")
    if recipe.model.trust_remote_code:
        arguments.append("--trust_remote_code")
    memory = f"{math.ceil(size * 1.5 / 2**30) + SERVER_GIB}Gi"
    accelerators = {recipe.resources.accelerator: str(gpus)} if gpus else {}
    model = {
        "modelFormat": {"name": "huggingface"},
        "args": arguments,
        "storageUri": model_uri,
        "resources": {
            "requests": {"cpu": "1", "memory": memory, **accelerators},
            "limits": {"memory": memory, **accelerators},
        },
    }
    account = {"serviceAccountName": spec.service_account} if spec.service_account else {}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name if name[0].isalpha() else f"m-{name}",  # a service's name begins with a letter
            **({"namespace": spec.namespace} if spec.namespace else {}),
            "labels": {
                "app.kubernetes.io/managed-by": "baton",
                "baton/run": run[:MAX_LABEL].rstrip("-"),
                "baton/digest": digest[:MAX_LABEL],
            },
            "annotations": {"baton/run": run, "baton/digest": digest},
        },
        "spec": {"predictor": {**account, "model": model}},
    }


def _check_kserve(draft: ExportDraft) -> ExportCheck:
    with open(f"{draft.target}/{KSERVE_FILE}", encoding="utf-8") as file:
        return check_inference_service(yaml.safe_load(file))


def check_inference_service(document: dict[str, Any]) -> ExportCheck:
    uri = document["spec"]["predictor"]["model"]["storageUri"]
    values = document["metadata"]["labels"].values()
    if document["kind"] != "InferenceService" or not all(LABEL.fullmatch(value) for value in values):
        raise BatonError(f"the kserve export is not an InferenceService with valid labels: {document['metadata']}.")
    return ExportCheck(library="yaml", words=f"read back, serves {uri}")


@dataclass(frozen=True)
class FormatSpec:
    write: Callable[[ExportDraft], None]
    check: Callable[[ExportDraft], ExportCheck]  # raises where the export does not count
    settings: tuple[str, ...] = ()  # keys of the recipe's export section that decide its bytes
    made_of_main: bool = False  # holds or names the main export's files


FORMATS = {
    "safetensors": FormatSpec(_write_safetensors, _check_safetensors, ("dtype", "shard_size")),
    "adapter": FormatSpec(_copy_model, _check_adapter),
    "gguf": FormatSpec(_write_gguf, _check_gguf, ("dtype", "gguf")),
    "onnx": FormatSpec(_write_onnx, _check_onnx, ("dtype", "onnx")),
    "mlflow": FormatSpec(_write_mlflow, functools.partial(_check_safetensors, export_format="mlflow"), ("dtype",)),
    "oci": FormatSpec(_write_oci, _check_oci, ("dtype", "shard_size"), made_of_main=True),
    "kserve": FormatSpec(_write_kserve, _check_kserve, ("dtype", "shard_size", "kserve"), made_of_main=True),
}
