"""Tiny twins of the gallery's models: their configuration with small numbers, random weights, and a tokenizer with
their family's kind of chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Document = dict[str, Any]

CONFIGS = Path(__file__).parent / "configs"
"""Configurations, a folder each, as far as they decide a model's shape; README.md there says what is left out."""

SPEAKS_LIKE = {
    "microsoft/Phi-4-mini-instruct": "microsoft/Phi-3.5-mini-instruct",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "HuggingFaceTB/SmolLM2-360M": "Qwen/Qwen2.5-0.5B",
    "HuggingFaceTB/SmolLM3-3B": "Qwen/Qwen2.5-0.5B",
}
"""Models whose template TRL does not carry → one of the same kind."""


def config_folder(base: str) -> str:
    """Returns the folder with a model's published configuration."""
    return str(CONFIGS / base.replace("/", "--"))


def published(base: str) -> Document:
    """Returns a model's published configuration."""
    document: Document = json.loads(Path(config_folder(base), "config.json").read_text(encoding="utf-8"))
    return document


def small(config: Document, words: int) -> Document:
    """Returns a configuration with small numbers, and everything else as it was published.

    Kept are the kind of attention (as many keys as queries, fewer, or one), heads wider than their share, windows,
    layers without positions, norms, tied embeddings, experts and how many of them work, sinks and scaled positions.

    Args:
        config: As published.
        words: Size of the vocabulary.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    made = {key: value for key, value in config.items() if key not in ("torch_dtype", "sliding_window_pattern")}
    made |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": words}
    made |= {"num_attention_heads": 4, "num_key_value_heads": 4 if groups == heads else min(groups, 2)}
    if "head_dim" in config:
        made["head_dim"] = 8 if config["head_dim"] * heads == config["hidden_size"] else 16
    if config.get("sliding_window"):
        made["sliding_window"] = 8
    for name in ("num_experts", "num_local_experts"):
        if name in config:
            made |= {name: 4, "num_experts_per_tok": 2}
    if "sliding_window_pattern" in config:
        made["layer_types"] = ["sliding_attention", "full_attention"]
    elif "layer_types" in config:
        made["layer_types"] = [config["layer_types"][0], config["layer_types"][-1]]
    if "no_rope_layers" in config:
        made["no_rope_layers"] = [config["no_rope_layers"][0], config["no_rope_layers"][-1]]
    if (config.get("rope_scaling") or {}).get("type") == "longrope":
        size = int(made["hidden_size"] // made["num_attention_heads"] * config["partial_rotary_factor"]) // 2
        made["rope_scaling"] = {"type": "longrope", "short_factor": [1.0] * size, "long_factor": [2.0] * size}
    return made


def make(base: str, folder: str, marks: tuple[str, ...]) -> None:
    """Saves the twin of a model, or the tokenizer alone where there is no configuration of that name.

    Args:
        base: Its name on the hub.
        folder: Where to.
        marks: Tokens that a recipe gives a task.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.importers.measuring import twins

    tokenizer = twins.tokenizer_of(SPEAKS_LIKE.get(base, base), marks)
    tokenizer.save_pretrained(folder)
    if not Path(config_folder(base)).is_dir():
        return
    settings = small(published(base), len(tokenizer))
    packed = settings.pop("quantization_config", None)
    settings |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    model.save_pretrained(folder)
    if packed:
        pack(folder, packed)


def pack(folder: str, settings: Document) -> None:
    """Puts experts in MXFP4 in the place of a saved gpt-oss' own, as its makers publish them: blocks of 32 numbers of
    4 bits, and a power of two for each."""
    import torch
    from safetensors.torch import load_file, save_file

    path = Path(folder)
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 127 - 6, dtype=torch.uint8)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = settings
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def loaded(folder: str, kind: str) -> None:
    """Loads an export as people do, with nothing of Baton's, and asks it."""
    import torch
    import transformers

    with open(f"{folder}/config.json", encoding="utf-8") as file:
        assert "quantization_config" not in json.load(file)
    model = getattr(transformers, kind).from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**tokenizer("What is 4 and 5?", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()
