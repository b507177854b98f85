"""LLaMA-Factory's training files: what they say, in a recipe's terms."""

from __future__ import annotations

import re

from baton.components.shared.core.errors import UserError
from baton.pipelines.importing import llamafactory_data, llamafactory_keys, results, weights
from baton.pipelines.importing.draft import Document, Draft
from baton.pipelines.importing.kinds import flag, number, read, whole, words
from baton.pipelines.importing.trainer import Trainer

ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
"""Attention by `flash_attn`."""

STAGES = {"pt": "pretrain", "sft": "sft", "rm": "reward", "kto": "kto", "dpo": "dpo"}
"""Method by stage; `dpo` may be another one by `pref_loss`."""

PREFERENCES: dict[str, tuple[str, Document]] = {
    "sigmoid": ("dpo", {}),
    "hinge": ("dpo", {"loss": ["hinge"]}),
    "ipo": ("dpo", {"loss": ["ipo"]}),
    "orpo": ("orpo", {}),
    "simpo": ("cpo", {"loss": "simpo", "likelihood": 0.0}),
}
"""Method and settings by `pref_loss`."""

RATE = 5e-5
"""Its default of the learning rate."""


def _choose(draft: Draft) -> tuple[str, Document]:
    """Returns the training method, and settings that follow from stage and loss.

    Raises:
        UserError: Baton has nothing like the stage.
    """
    stage = str(draft.get("stage", "sft"))
    if stage == "ppo":
        raise UserError(
            f"{draft.origin}: stage is 'ppo', and Baton has no PPO.",
            remedy="Take training.method grpo or rloo with a reward function; see docs/recipe.md.",
        )
    if stage not in STAGES:
        raise draft.wrong("stage", f"one of {', '.join(STAGES)}")
    draft.carry("training.method", "stage")
    if stage == "rm":
        draft.changed("stage", "the score comes from a sequence classifier, not from a value head beside the model")
    return _preference(draft) if stage == "dpo" else (STAGES[stage], {})


def _preference(draft: Draft) -> tuple[str, Document]:
    loss = str(draft.get("pref_loss", "sigmoid"))
    if loss not in PREFERENCES:
        draft.left("pref_loss", f"no such loss; sigmoid is used. Baton has {', '.join(PREFERENCES)} and more")
        loss = "sigmoid"
    method, settings = PREFERENCES[loss]
    draft.carry(f"training.{method}", "pref_loss")
    if method != "dpo":
        return method, settings
    losses, shares = settings.get("loss", ["sigmoid"]), [1.0]
    for key, name in (("pref_bco_weight", "bco_pair"), ("pref_ftx", "sft")):
        share = read(draft, key, number, 0.0)
        if share:
            losses, shares = [*losses, name], [*shares, share]
            draft.changed(key, f"added as loss {name}, whose mean is TRL's: over the batch's tokens, not per answer")
    if draft.has("dpo_label_smoothing"):
        nearest = f"{{loss: robust, label_smoothing: {draft.get('dpo_label_smoothing')}}}"
        draft.left("dpo_label_smoothing", f"sigmoid takes none here; training.dpo: {nearest} is the nearest")
    return method, {"loss": losses, "loss_weights": shares} if len(losses) > 1 else settings


def _weights(draft: Draft, method: str) -> None:
    kind = str(draft.get("finetuning_type", "lora"))
    if kind == "lora":
        weights.lora(draft, "finetuning_type", "lora_rank", alpha=None, rate=RATE)
        target = read(draft, "lora_target", words, ["all"])
        draft.put("adapter.target_modules", "all-linear" if target == ["all"] else target, "lora_target")
    elif kind == "freeze":
        _freeze(draft)
    elif kind == "full":
        draft.carry("adapter", "finetuning_type")
    else:
        raise draft.wrong("finetuning_type", "lora, freeze or full, which Baton has", "Choose one of them.")
    _precision(draft, kind)
    _quantization(draft)


def _freeze(draft: Draft) -> None:
    """Sets the trained layers: the last ones by number, the first ones by their names."""
    key, parts, extra = "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"
    count = int(read(draft, key, number, 2))
    if abs(count) > 1000:
        raise draft.wrong(key, "a number of layers")
    patterns = [re.escape(name) for name in read(draft, extra, words, [])]
    if count > 0:
        draft.put("training.trainable.last_layers", count, key, "finetuning_type")
    elif count < 0:
        first = "|".join(str(at) for at in range(-count))
        patterns.insert(0, rf"\.(layers|h|blocks)\.({first})\.")
        draft.changed(key, "the first blocks by their names; check the pattern against the model's parameter names")
    elif not patterns:
        raise draft.wrong(key, f"a number of layers other than 0, or {extra}")
    if patterns:
        draft.put("training.trainable.patterns", patterns, key, extra, "finetuning_type")
    if draft.get(parts, "all") == "all":
        draft.carry("training.trainable", parts)
    else:
        draft.left(parts, "whole blocks are trained; give their parts in trainable.patterns")


def _precision(draft: Draft, kind: str) -> None:
    """Sets types: what is frozen is held in the short type, what is trained in 32 bits unless `pure_bf16`."""
    pure = read(draft, "pure_bf16", flag, False)
    short = next((name for name in ("bf16", "fp16") if read(draft, name, flag, False)), "fp32")
    weights.precision(draft, "fp32" if pure else short, "bf16", "fp16")
    if pure:
        draft.put("model.dtype", "bfloat16", "pure_bf16")
    elif kind == "lora" and short != "fp32":
        draft.put("model.dtype", weights.DTYPES[short])
    draft.rest("pure_bf16")


def _quantization(draft: Draft) -> None:
    key, method = "quantization_bit", "quantization_method"
    if draft.has(key) and str(draft.get(method, "bnb")) not in ("bnb", "bitsandbytes"):
        for named in (key, method):
            draft.left(named, "only bitsandbytes is there: set model.quantization; weights are whole here")
        return
    bits = read(draft, key, whole)
    if bits not in (None, 4, 8):
        draft.left(key, "bitsandbytes has 4 and 8 bits: set model.quantization; weights are whole here")
    elif weights.quantization(draft, bits, key, method):
        draft.put("model.quantization.type", str(draft.get("quantization_type", "nf4")), "quantization_type")
        double = read(draft, "double_quantization", flag, True)
        draft.put("model.quantization.double", double, "double_quantization")


def _arithmetic(draft: Draft, method: str) -> None:
    """Sets attention and what is recomputed."""
    off, path = "disable_gradient_checkpointing", "training.gradient_checkpointing"
    draft.put(path, not read(draft, off, flag, False), off)
    draft.carry(path, "gradient_checkpointing")
    chosen = str(draft.get("flash_attn"))
    if chosen in ATTENTION:
        draft.put("model.attention", ATTENTION[chosen], "flash_attn")
    elif chosen == "auto":
        draft.carry("model.attention", "flash_attn")


TRAINER = Trainer(
    tool="LLaMA-Factory",
    model="model_name_or_path",
    micro=("per_device_train_batch_size", 8),
    epochs=("num_train_epochs", 3.0),
    held_out="val_size",
    evaluates=False,
    patience="early_stopping_steps",
    scheduler="lr_scheduler_type",
    assumed={"training.learning_rate": RATE, "data.max_length": 2048},
    choose=_choose,
    methods=llamafactory_keys.METHODS,
    weights=_weights,
    data=llamafactory_data.data,
    arithmetic=_arithmetic,
    results=results.of_llamafactory,
    keys=llamafactory_keys.TABLE,
)
