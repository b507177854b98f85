"""axolotl's training files: what they say, in a recipe's terms."""

from __future__ import annotations

import os
import re

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import SPECS
from baton.pipelines.importing import axolotl_data, axolotl_keys, pacing, results, weights
from baton.pipelines.importing.draft import Document, Draft
from baton.pipelines.importing.kinds import flag, is_on, number, numbers, read, whole, words
from baton.pipelines.importing.table import fill
from baton.pipelines.importing.trainer import Trainer

METHODS: dict[str, tuple[str, Document]] = {
    "dpo": ("dpo", {}),
    "ipo": ("dpo", {"loss": ["ipo"]}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "simpo": ("cpo", {"loss": "simpo"}),
    "grpo": ("grpo", {}),
}
"""Method and settings by `rl`."""

MICRO = "micro_batch_size"
RATE = 2e-5
"""Its default of the learning rate."""

EMBEDDINGS = "embed_tokens|lm_head"
"""The parameters that `embedding_lr` is for."""

ATTENTION = {"flash": "flash_attention_2", "sdp": "sdpa", "flex": "flex_attention", "eager": "eager"}
"""Attention by its short name; the key that turns it on is that name and `_attention`."""


def _choose(draft: Draft) -> tuple[str, Document]:
    """Returns the training method, and settings that follow from its name.

    Raises:
        UserError: Baton has nothing like the method.
    """
    rl = str(draft.get("rl") or "")
    if draft.has("process_reward_model"):
        raise draft.wrong("process_reward_model", "no reward per step, which Baton does not train", "Remove it.")
    if rl and rl not in METHODS:
        raise draft.wrong("rl", f"one of {', '.join(METHODS)}", "See training.method in docs/recipe.md for others.")
    draft.carry("training.method", "rl", "reward_model")
    if rl:
        return METHODS[rl]
    if draft.has("reward_model"):
        return "reward", {}
    return ("pretrain" if draft.keys("pretraining_dataset") else "sft"), {}


def _dpo(draft: Draft) -> None:
    """Sets what is added to the loss, and smoothing where the loss takes it."""
    losses = draft.look("training.dpo.loss", ["sigmoid"])
    share = read(draft, "rpo_alpha", number, 0.0)
    if share:
        shares = draft.look("training.dpo.loss_weights", [1.0] * len(losses))
        losses = [*losses, "sft"]
        draft.put("training.dpo.loss", losses, "rpo_alpha")
        draft.put("training.dpo.loss_weights", [*shares, share])
    key = "dpo_label_smoothing"
    if draft.has(key) and ("robust" in losses or "exo_pair" in losses):
        draft.put("training.dpo.label_smoothing", read(draft, key, number), key)
    elif draft.has(key):
        draft.left(key, f"has an effect only with training.dpo.loss robust or exo_pair, not {', '.join(losses)}")


def _grpo(draft: Draft) -> None:
    """Sets what judges completions: axolotl finds functions by `module.function`, in the folder it runs in.

    Raises:
        UserError: there is no reward function.
    """
    key = "trl.reward_funcs"
    names = read(draft, key, words, [])
    if not names or not all("." in name.strip(".") for name in names):
        raise UserError(
            f"{draft.origin}: {key} is {draft.get(key)!r}, expected functions as module.function.",
            remedy="Name what judges completions; Baton needs it too.",
        )
    shares = read(draft, "trl.reward_weights", numbers, [1.0] * len(names))
    if len(shares) != len(names):
        raise draft.wrong("trl.reward_weights", f"a number for each of the {len(names)} functions")
    rewards = [
        {"use": ":".join(name.rsplit(".", 1)), "weight": share} for name, share in zip(names, shares, strict=True)
    ]
    draft.put("training.grpo.rewards", rewards, key, "trl.reward_weights")
    modules = sorted({name.rsplit(".", 1)[0].split(".")[0] for name in names})
    paths = [draft.reach(f"{name}.py") for name in modules]
    files = [path for path in paths if os.path.exists(os.path.join(draft.target, path))]
    if len(files) == len(modules) == 1:
        draft.put("hooks.source", files[0])
    else:
        imported = ", ".join(modules)
        draft.changed(key, f"the code of {imported} must be in the image, or in the file or folder of hooks.source")
    sync, steps, share = "trl.sync_ref_model", "trl.ref_model_sync_steps", "trl.ref_model_mixup_alpha"
    if draft.has(sync) and (draft.has("adapter") or not draft.look("training.grpo.beta")):
        draft.left(sync, "the reference follows only full weights, with beta above 0")
    elif draft.has(sync):
        every, mix = read(draft, steps, whole, 64), read(draft, share, number, 0.9)
        draft.put("training.grpo.sync_reference", {"every": every, "mix": mix}, sync, steps, share)
    pacing.fit_generations(draft, draft.look("training.grpo.num_generations", 8), MICRO)


def _weights(draft: Draft, method: str) -> None:
    if method == "dpo":
        _dpo(draft)
    if method == "grpo":
        _grpo(draft)
    _adapter(draft)
    _precision(draft)
    keys = [key for key in ("load_in_8bit", "load_in_4bit") if read(draft, key, flag, False)]
    bits = 8 if "load_in_8bit" in keys else 4 if keys or draft.get("adapter") == "qlora" else None
    if weights.quantization(draft, bits, "load_in_8bit", "load_in_4bit"):
        fill(draft, axolotl_keys.BITS_AND_BYTES)
    if draft.has("unfrozen_parameters"):
        _unfrozen(draft)
    _groups(draft)


def _adapter(draft: Draft) -> None:
    kind = draft.get("adapter")
    if not kind:
        draft.rest("adapter")
        return
    if kind not in ("lora", "qlora"):
        raise draft.wrong("adapter", "lora or qlora, which Baton has", "Choose one of them, or leave adapter empty.")
    weights.lora(draft, "adapter", "lora_r", alpha=8, rate=RATE)
    linear, modules = "lora_target_linear", "lora_target_modules"
    if read(draft, linear, flag, False):
        draft.put("adapter.target_modules", "all-linear", linear)
        if draft.has(modules):
            draft.needless(modules, f"{linear} takes all linear layers")
    elif draft.has(modules):
        pattern = draft.get(modules)
        target = pattern if isinstance(pattern, str) else read(draft, modules, words)
        draft.put("adapter.target_modules", target, modules)


def _precision(draft: Draft) -> None:
    """Sets types: axolotl holds all weights in the type it computes in."""
    pure = next((name for name in ("bfloat16", "float16", "float32") if is_on(draft, name)), None)
    keys = ("bf16", "fp16")
    if pure and not any(map(draft.has, keys)):
        draft.put("model.dtype", pure, pure)
        weights.precision(draft, "fp32", *keys)
        return
    auto = draft.get("bf16", "auto") == "auto"
    half = read(draft, "fp16", flag, False)
    wanted = "bf16" if not auto and read(draft, "bf16", flag) else "fp16" if half else "bf16" if auto else "fp32"
    weights.precision(draft, wanted, *keys)
    if wanted == "bf16" or (wanted == "fp16" and draft.look("adapter") is not None):
        draft.put("model.dtype", weights.DTYPES[wanted])
    if wanted == "bf16" and draft.get("bf16") == "auto":
        draft.changed("bf16", "taken as bf16, which needs an Ampere GPU or a newer one; fp16 for older ones")
    elif wanted == "bf16" and auto:
        draft.assumed.append("training.precision bf16, model.dtype bfloat16")


def _groups(draft: Draft) -> None:
    """Sets the parameters with their own learning rate."""
    rate = read(draft, "learning_rate", number, RATE)
    groups: list[Document] = [*draft.look("training.groups", [])]
    if draft.has("lr_groups"):
        groups += read(draft, "lr_groups", _groups_of, [])
        draft.carry("training.groups", "lr_groups")
    own = read(draft, "embedding_lr", number) or rate * read(draft, "embedding_lr_scale", number, 0)
    if own:
        groups.append({"pattern": EMBEDDINGS, "learning_rate": float(f"{own:.12g}")})
        draft.carry("training.groups", "embedding_lr", "embedding_lr_scale")
    if groups:
        draft.put("training.groups", groups)


def _groups_of(value: object) -> list[Document]:
    """Returns groups of parameters from axolotl's, each of a name, parts of parameter names, and a rate."""
    keys = {"modules", "lr"}
    if not isinstance(value, list) or not all(isinstance(group, dict) and keys <= group.keys() for group in value):
        raise ValueError("groups of name, modules and lr")
    patterns = ["|".join(re.escape(name) for name in words(group["modules"])) for group in value]
    return [
        {"pattern": pattern, "name": str(group.get("name", pattern)), "learning_rate": number(group["lr"])}
        for pattern, group in zip(patterns, value, strict=True)
    ]


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


def _arithmetic(draft: Draft, method: str) -> None:
    """Sets attention, what is recomputed, and the floor of a cosine."""
    for short, name in ATTENTION.items():
        if is_on(draft, f"{short}_attention"):
            draft.put("model.attention", name, f"{short}_attention")
    for key in ("attn_implementation", "attention"):
        value = str(draft.get(key, ""))
        name = ATTENTION.get(value, value)
        if name in ("flash_attention_3", *ATTENTION.values()):
            draft.put("model.attention", name, key)
    _recomputation(draft, method)
    key = "cosine_min_lr_ratio"
    if draft.has(key) and draft.get("lr_scheduler", "cosine") != "cosine":
        draft.needless(key, "lr_scheduler is not cosine")
    elif draft.has(key):
        draft.put("training.lr_scheduler", "cosine_with_min_lr", "lr_scheduler", key)
        draft.put("training.lr_scheduler_options", {"min_lr_rate": read(draft, key, number)})


def _recomputation(draft: Draft, method: str) -> None:
    """Sets whether activations are computed again or offloaded, where the method's trainer does."""
    key, asked = "gradient_checkpointing", "activation_offloading"
    value = draft.get(key)
    offloads = value in ("offload", "offload_disk", "unsloth")
    if value is not None:
        draft.put("training.gradient_checkpointing", offloads or read(draft, key, flag, False), key)
    if SPECS[method].offloads_activations:
        if offloads or draft.has(asked):
            draft.put("training.activation_offloading", True, asked)
        if value == "offload_disk":
            draft.changed(key, "activations go to the host's memory, not to a disk")
        return
    if offloads:
        draft.changed(key, f"activations are computed again, not offloaded: {method}'s trainer keeps them there")
    if draft.has(asked):
        draft.left(asked, f"{method}'s trainer does not offload; take gradient_checkpointing: true")


TRAINER = Trainer(
    tool="axolotl",
    model="base_model",
    nested=("datasets", "test_datasets", "pretraining_dataset", "trl", "bnb_config_kwargs"),
    micro=(MICRO, 1),
    product="batch_size",
    epochs=("num_epochs", 1.0),
    warmup=0.03,
    held_out="val_set_size",
    per_epoch=("evals_per_epoch", "saves_per_epoch"),
    evaluates=True,
    patience="early_stopping_patience",
    scheduler="lr_scheduler",
    assumed={"training.lr_scheduler": "cosine", "training.optimizer": "adamw_torch_fused"},
    choose=_choose,
    methods=axolotl_keys.METHODS,
    weights=_weights,
    data=axolotl_data.data,
    arithmetic=_arithmetic,
    results=results.of_axolotl,
    keys=axolotl_keys.TABLE,
)
