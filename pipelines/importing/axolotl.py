"""axolotl's training files: what they say, in a recipe's terms.

Its defaults are written out where they differ from ours and the file leaves the key out.
"""

from __future__ import annotations

import re

from baton.components.shared.recipe import SPECS
from baton.pipelines.importing import axolotl_data, axolotl_methods, axolotl_results, pacing, weights
from baton.pipelines.importing.axolotl_keys import BITS_AND_BYTES, TABLE
from baton.pipelines.importing.draft import Document, Draft
from baton.pipelines.importing.kinds import flag, is_on, number, read, whole, words
from baton.pipelines.importing.table import apply, fill

TOOL = "axolotl"
NESTED = ("datasets", "test_datasets", "pretraining_dataset", "trl", "bnb_config_kwargs")
"""Keys whose sections are taken apart."""

MODEL = "base_model"
MICRO = "micro_batch_size"
EMBEDDINGS = "embed_tokens|lm_head"
"""The parameters that `embedding_lr` is for."""

ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
"""Attention by the key that turns it on."""

NAMES = {"flash": "flash_attention_2", "sdp": "sdpa", "flex": "flex_attention"}
"""Attention by the short names of `attention`."""


def convert(draft: Draft) -> None:
    """Fills a recipe from an axolotl file and handles each of its keys.

    Raises:
        UserError: the file is another kind of file, or asks for what Baton cannot do at all.
    """
    method = axolotl_methods.method(draft)
    pacing.batch(draft, MICRO, "gradient_accumulation_steps", micro=1, whole_key="batch_size")
    pacing.fit_memory(draft, method)
    pacing.length(draft, "num_epochs", epochs=1.0)
    pacing.warmup(draft)
    draft.assume("training.warmup_steps", 0.03)
    if method == "kto":
        pacing.fit_kto(draft, MICRO)
    if method == "grpo":
        axolotl_methods.grpo(draft)
        pacing.fit_generations(draft, draft.look("training.grpo.num_generations", 8), MICRO)
    _adapter(draft)
    _precision(draft)
    _quantization(draft)
    _trained(draft)
    axolotl_data.data(draft, method)
    pacing.held_out(draft, "val_set_size")
    pacing.evaluations(draft, ("eval_strategy", "evaluation_strategy"), by_default=True)
    pacing.checkpoints(draft)
    pacing.early_stopping(draft, "early_stopping_patience")
    pacing.best(draft)
    pacing.order(draft, method)
    _arithmetic(draft)
    _schedule(draft)
    weights.compilation(draft)
    axolotl_results.results(draft, method)
    apply(draft, TABLE)
    pacing.plateau(draft, "lr_scheduler")
    draft.assume("training.lr_scheduler", "cosine")
    draft.assume("training.optimizer", "adamw_torch_fused")
    draft.put("resources.gpus", 1)


def _adapter(draft: Draft) -> None:
    kind = draft.get("adapter")
    if not kind:
        draft.rest("adapter")
        return
    if kind not in ("lora", "qlora"):
        raise draft.wrong("adapter", "lora or qlora, which Baton has", "Choose one of them, or leave adapter empty.")
    draft.put("adapter.type", "lora", "adapter")
    draft.put("adapter.r", read(draft, "lora_r", whole, 8), "lora_r")
    draft.put("adapter.alpha", read(draft, "lora_alpha", whole, 8), "lora_alpha")
    if read(draft, "lora_target_linear", flag, False):
        draft.put("adapter.target_modules", "all-linear", "lora_target_linear")
        if draft.has("lora_target_modules"):
            draft.needless("lora_target_modules", "lora_target_linear takes all linear layers")
    elif draft.has("lora_target_modules"):
        target_modules = draft.get("lora_target_modules")
        target = target_modules if isinstance(target_modules, str) else read(draft, "lora_target_modules", words)
        draft.put("adapter.target_modules", target, "lora_target_modules")
    weights.loraplus(draft, read(draft, "learning_rate", number, 2e-5))


def _precision(draft: Draft) -> None:
    """Sets types: axolotl holds all weights in the type it computes in."""
    held = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    pure = next((key for key in held if is_on(draft, key)), None)
    keys = ("bf16", "fp16")
    if pure and not (draft.has("bf16") or draft.has("fp16")):
        draft.put("model.dtype", held[pure], pure)
        weights.precision(draft, "fp32", *keys)
        return
    auto = draft.get("bf16", "auto") == "auto"
    half = read(draft, "fp16", flag, False)
    wanted = "bf16" if not auto and read(draft, "bf16", flag) else "fp16" if half else "bf16" if auto else "fp32"
    weights.precision(draft, wanted, *keys)
    if wanted == "bf16":
        draft.put("model.dtype", "bfloat16")
        if draft.get("bf16") == "auto":
            draft.changed("bf16", "taken as bf16, which needs an Ampere GPU or a newer one; fp16 for older ones")
        elif auto:
            draft.assumed.append("training.precision bf16, model.dtype bfloat16")
    elif wanted == "fp16" and draft.look("adapter") is not None:
        draft.put("model.dtype", "float16")


def _quantization(draft: Draft) -> None:
    keys = [key for key in ("load_in_8bit", "load_in_4bit") if read(draft, key, flag, False)]
    bits = 8 if "load_in_8bit" in keys else 4 if keys or draft.get("adapter") == "qlora" else None
    if not weights.quantization(draft, bits, "load_in_8bit", "load_in_4bit") or bits != 4:
        return
    fill(draft, BITS_AND_BYTES)


def _trained(draft: Draft) -> None:
    """Sets which parameters are trained, and those with their own learning rate."""
    if draft.has("unfrozen_parameters"):
        _unfrozen(draft)
    rate = read(draft, "learning_rate", number, 2e-5)
    groups: list[Document] = draft.look("training.groups", [])
    if draft.has("lr_groups"):
        groups = [*groups, *read(draft, "lr_groups", _groups, [])]
        draft.carry("training.groups", "lr_groups")
    own = read(draft, "embedding_lr", number) or rate * read(draft, "embedding_lr_scale", number, 0)
    if own:
        groups = [*groups, {"pattern": EMBEDDINGS, "learning_rate": float(f"{own:.12g}")}]
        draft.carry("training.groups", "embedding_lr", "embedding_lr_scale")
    if groups:
        draft.put("training.groups", groups)


def _groups(value: object) -> list[Document]:
    """Returns groups of parameters from axolotl's, each of a name, parts of parameter names, and a rate."""
    keys = {"modules", "lr"}
    if not isinstance(value, list) or not all(isinstance(group, dict) and keys <= group.keys() for group in value):
        raise ValueError("groups of name, modules and lr")
    groups = []
    for group in value:
        pattern = "|".join(re.escape(name) for name in words(group["modules"]))
        groups.append(
            {"pattern": pattern, "name": str(group.get("name", pattern)), "learning_rate": number(group["lr"])}
        )
    return groups


def _unfrozen(draft: Draft) -> None:
    """Sets the trained parameters: axolotl looks for its patterns at the start of a name."""
    key = "unfrozen_parameters"
    if draft.look("adapter") is not None:
        draft.left(key, "an adapter freezes the weights; whole layers beside it: adapter.modules_to_save")
        return
    patterns = []
    for pattern in read(draft, key, words, []):
        whole_name = re.sub(r"\[\d*:?\d*\]$", "", pattern)
        if whole_name != pattern:
            draft.changed(key, f"{pattern}: a part of a parameter cannot be trained alone, so all of it is")
        patterns.append(whole_name if whole_name.startswith("^") else f"^{whole_name}")
    draft.put("training.trainable.patterns", patterns, key)


def _arithmetic(draft: Draft) -> None:
    """Sets attention and what is recomputed."""
    for key, name in ATTENTION.items():
        if is_on(draft, key):
            draft.put("model.attention", name, key)
    for key in ("attn_implementation", "attention"):
        value = str(draft.get(key, ""))
        name = NAMES.get(value, value)
        if name in ("flash_attention_3", *ATTENTION.values()):
            draft.put("model.attention", name, key)
    key = "gradient_checkpointing"
    value = draft.get(key)
    offloads = value in ("offload", "offload_disk", "unsloth")
    if value is not None:
        draft.put("training.gradient_checkpointing", offloads or read(draft, key, flag, False), key)
    asked = "activation_offloading"
    method = str(draft.look("training.method"))
    if not SPECS[method].offloads_activations:
        if offloads:
            draft.changed(key, f"activations are computed again, not offloaded: {method}'s trainer keeps them there")
        if draft.has(asked):
            draft.left(asked, f"{method}'s trainer does not offload; take gradient_checkpointing: true")
        return
    if offloads or draft.has(asked):
        draft.put("training.activation_offloading", True, asked)
    if value == "offload_disk":
        draft.changed(key, "activations go to the host's memory, not to a disk")


def _schedule(draft: Draft) -> None:
    """Sets Adam's decay rates and the floor of a cosine."""
    weights.betas(draft)
    key = "cosine_min_lr_ratio"
    if draft.has(key):
        if draft.get("lr_scheduler", "cosine") != "cosine":
            draft.needless(key, "lr_scheduler is not cosine")
            return
        draft.put("training.lr_scheduler", "cosine_with_min_lr", "lr_scheduler", key)
        draft.put("training.lr_scheduler_options", {"min_lr_rate": read(draft, key, number)})
