"""A model's settings as GGUF knows them. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.models.exportable import GGUF_NAMES

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

ACTIVATIONS = {"gpt2": ("gelu_new",), "gemma2": ("gelu_pytorch_tanh",), "gemma3": ("gelu_pytorch_tanh",)}
"""Activation functions that llama.cpp computes, where not SiLU."""

GEMMA = ("gemma2", "gemma3")
GEMMA3_PATTERN = 6
"""Of so many layers of Gemma 3 the last sees everything, in llama.cpp always."""
GEMMA3_LOCAL_BASE = 10_000.0
"""Base of the position embeddings in the other layers, in llama.cpp always."""


def add(writer: GGUFWriter, config: Any) -> None:
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


def document(config: Any) -> dict[str, Any]:
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
