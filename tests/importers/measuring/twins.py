"""Tiny twins: a model of the architecture that a name implies, with a few layers and a tokenizer made on the spot."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

ARCHITECTURES = {
    r"llama-4": "llama4_text",
    r"qwen3\.5-\d+b-a\d": "qwen3_5_moe_text",
    r"qwen3\.5": "qwen3_5_text",
    r"qwen3-next": "qwen3_next",
    r"qwen3-\d+b-a\d": "qwen3_moe",
    r"qwen3|plano-": "qwen3",
    r"qwen1\.5-moe": "qwen2_moe",
    r"qwen-7b|mimo-|replit-code|btlm": "",  # their code is in the repository
    r"qwen|deepcoder": "qwen2",
    r"mixtral": "mixtral",
    r"ministral-3-": "ministral3",
    r"mistral|magistral|devstral|ministral": "mistral",
    r"gemma-?3n": "gemma3n_text",
    r"gemma-?4": "gemma4_text",
    r"gemma-?3": "gemma3_text",
    r"gemma-?2": "gemma2",
    r"gemma": "gemma",
    r"glm-4\.7-flash": "glm4_moe_lite",
    r"glm-4\.\d": "glm4_moe",
    r"glm-5": "glm_moe_dsa",
    r"glm": "glm4",
    r"gpt-oss": "gpt_oss",
    r"falcon-h1": "falcon_h1",
    r"falcon-e": "llama",
    r"falcon": "falcon",
    r"dbrx": "dbrx",
    r"stablelm": "stablelm",
    r"nemotron-3": "nemotron_h",
    r"nemotron": "nemotron",
    r"phi-3": "phi3",
    r"phi": "phi",
    r"jamba": "jamba",
    r"hunyuan": "hunyuan_v1_dense",
    r"apertus": "apertus",
    r"mamba": "mamba",
    r"mpt-": "mpt",
    r"pythia|redpajama": "gpt_neox",
    r"cerebras-gpt": "gpt2",
    r"gpt-j": "gptj",
    r"starcoder2": "starcoder2",
    r"kimi-linear": "kimi_linear",
    r"lfm2-\d+b-a\d": "lfm2_moe",
    r"lfm2": "lfm2",
    r"granite-4": "granitemoehybrid",
    r"trinity": "afmoe",
    r"afm-": "arcee",
    r"olmo-3": "olmo3",
    r"deepseek-v4": "deepseek_v4",
    r"deepseek-v2": "deepseek_v2",
    r"deepseek": "deepseek_v3",
    r"seed-oss": "seed_oss",
    r"c4ai-command-r7b": "cohere2",
    r"minimax-m2": "minimax_m2",
    r"llama|smollm|xgen|yi-|orpheus": "llama",
}
"""`model_type` by a pattern of the name in lower case, the first that fits; empty where Transformers has no class."""

RECURRENT = re.compile(r"lfm|falcon_h1|kimi_linear|qwen3_next|qwen3_5|nemotron_h|jamba|granitemoehybrid|mamba")
"""Architectures that keep packed rows apart only with kernels that a CPU lacks."""

TEMPLATES = {
    r"qwen3.*-2507": "qwen3_instruct_2507",
    r"qwen3\.5": "qwen3_5_think",
    r"qwen3": "qwen3",
    r"qwen": "qwen2_5",
    r"llama-3\.2.*instruct": "llama3_2",
    r"llama-3.*instruct": "llama3",
    r"gemma-?3.*-it": "gemma3",
    r"gemma-?4": "gemma4",
    r"gpt-oss": "gptoss",
    r"glm": "glm4moe",
    r"phi-3\.5": "phi3_5",
    r"phi-3": "phi3",
    r"command-r7b": "cohere2",
    r"deepseek-v": "deepseekv3",
    r"lfm2": "lfm2",
    r"nemotron-3-super": "nemotron_3_super",
    r"nemotron-3": "nemotron_3_nano",
}
"""Chat template, as TRL carries it, by a pattern of the name."""

CHATS = re.compile(
    r"instruct|chat|-it\b|-rl\b|reward|thinking|reasoning|preview|magistral|mistral-(small|medium)|llama-4|minimax|"
    r"deepcoder|plano|afm-4|jamba-1"
)
"""Names of models that have been taught to talk; where TRL has no template of theirs, ChatML stands for it."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BOUNDS = {
    r"llama-?[34]": ("<|begin_of_text|>", "<|end_of_text|>"),
    r"gemma": ("<bos>", "<eos>"),
    r"llama|mistral|mixtral|ministral|magistral|devstral|yi-|xgen": ("<s>", "</s>"),
}
"""First and last token of a text by a pattern of the name; `<|endoftext|>` elsewhere."""

MARK = re.compile(r"<\|?[\w.\s/|-]{1,30}?\|?>|<｜[^｜]+｜>|\[/?[A-Z_]+\]")

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "mlp_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim", "qk_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 8192),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                     "moe_latent_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "index_n_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input", "laurel_rank",
                     "rotary_dim", "mamba_d_state", "ssm_state_size", "mamba_state_size", "state_size", "index_topk",
                     "window_size", "sliding_window"), 8),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "n_shared_experts", "num_kv_shared_layers",
                     "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("mamba_d_ssm", "mamba_expand_size"), 32),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "o_groups"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "router_aux_loss_coef": 0.0,
}  # fmt: skip
"""Settings of a tiny model; an architecture takes those that it has."""


def architecture(name: str) -> str:
    """Returns the `model_type` that a model's name implies, empty where Transformers has no such class."""
    return next((kind for pattern, kind in ARCHITECTURES.items() if re.search(pattern, name.lower())), "llama")


def template(name: str) -> str | None:
    """Returns the chat template that a model of this name has, None for one that has none."""
    known = next((file for pattern, file in TEMPLATES.items() if re.search(pattern, name.lower())), "")
    if known:
        return (resources.files("trl") / "chat_templates" / f"{known}.jinja").read_text(encoding="utf-8")
    return CHATML if CHATS.search(name.lower()) else None


@cache
def _bytes() -> str:
    """Returns a byte-level tokenizer with few merges, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the answer to a question is the one that the assistant gives"] * 2, trainer)
    return str(tokenizer.to_str())


def tokenizer_of(name: str, marks: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the template that a name implies, its marks and further ones as single tokens."""
    first, last = next(
        (bounds for pattern, bounds in BOUNDS.items() if re.search(pattern, name.lower())), ("<|endoftext|>",) * 2
    )
    written = template(name)
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bytes()), bos_token=first, eos_token=last)
    found = (*MARK.findall(written or ""), *marks)
    own = [mark for mark in found if " " not in mark and mark not in (first, last)]
    made.add_tokens([*dict.fromkeys(own)], special_tokens=True)
    made.chat_template = written
    return made


@cache
def head_length(name: str) -> int:
    """Returns how many tokens the template that a name implies begins with: pages of text for some."""
    tokenizer = tokenizer_of(name)
    if not tokenizer.chat_template:
        return 0
    return len(
        tokenizer(str(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)))["input_ids"]
    )


@cache
def make(name: str, folder: Path, marks: tuple[str, ...] = (), *, scores: bool = False) -> Path | None:
    """Saves the twin of a model below a folder, and returns where; None where Transformers has no such class."""
    kind = architecture(name)
    if not kind:
        return None
    target = folder / re.sub(r"[^\w.-]+", "--", f"{name}{'-scores' if scores else ''}{'-'.join(marks)}")
    tokenizer = tokenizer_of(name, marks)
    config = config_of(kind, tokenizer)
    torch.manual_seed(0)
    if scores:
        config.num_labels = 1
    maker = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    maker.from_config(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def config_of(kind: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Returns the configuration of a tiny model of an architecture."""
    usual = AutoConfig.for_model(kind).to_dict()
    small = {key: value for key, value in SMALL.items() if usual.get(key) is not None or key == "head_dim" in usual}
    small |= {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    if isinstance(layers := usual.get("layer_types"), list) and layers:
        both = list(dict.fromkeys(layers))[:2]
        small["layer_types"] = [both[0], both[-1]]
    return AutoConfig.for_model(kind, **(small | PARTICULAR.get(kind, {})))


PARTICULAR: dict[str, dict[str, Any]] = {
    **{
        kind: {"num_key_value_heads": 4, "num_experts_per_tok": 2}
        for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear")
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "falcon_h1": {"mamba_d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 1024},
    "gemma4_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 1024},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
}
"""What single architectures need besides."""
