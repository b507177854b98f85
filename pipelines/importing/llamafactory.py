"""LLaMA-Factory's training files: what they say, in a recipe's terms.

Its defaults are written out where they differ from ours and the file leaves the key out.
"""

from __future__ import annotations

import re

from baton.components.shared.core.errors import UserError
from baton.pipelines.importing import llamafactory_data, llamafactory_results, pacing, weights
from baton.pipelines.importing.draft import Document, Draft
from baton.pipelines.importing.kinds import flag, number, read, whole, words
from baton.pipelines.importing.llamafactory_keys import METHODS, TABLE
from baton.pipelines.importing.table import apply, fill

TOOL = "LLaMA-Factory"
NESTED: tuple[str, ...] = ()
"""Keys whose sections are taken apart: none, its files are flat."""

MODEL = "model_name_or_path"
MICRO = "per_device_train_batch_size"

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


def convert(draft: Draft) -> None:
    """Fills a recipe from a LLaMA-Factory file and handles each of its keys.

    Raises:
        UserError: the file is another kind of file, or asks for what Baton cannot do at all.
    """
    method = _method(draft)
    pacing.batch(draft, MICRO, "gradient_accumulation_steps", micro=8)
    pacing.fit_memory(draft, method)
    pacing.length(draft, "num_train_epochs", epochs=3.0)
    pacing.warmup(draft)
    if method == "kto":
        pacing.fit_kto(draft, MICRO)
    kind = _finetuning(draft)
    _precision(draft, kind)
    _quantization(draft)
    llamafactory_data.data(draft, method)
    pacing.held_out(draft, "val_size")
    pacing.evaluations(draft, ("eval_strategy", "evaluation_strategy"), by_default=False)
    pacing.checkpoints(draft)
    pacing.early_stopping(draft, "early_stopping_steps")
    pacing.best(draft)
    pacing.order(draft, method)
    checkpointing = not read(draft, "disable_gradient_checkpointing", flag, False)
    draft.put("training.gradient_checkpointing", checkpointing, "disable_gradient_checkpointing")
    draft.carry("training.gradient_checkpointing", "gradient_checkpointing")
    weights.betas(draft)
    _attention(draft)
    weights.compilation(draft)
    llamafactory_results.results(draft, method)
    apply(draft, TABLE)
    pacing.plateau(draft, "lr_scheduler_type")
    draft.assume("training.learning_rate", 5e-5)
    draft.assume("data.max_length", 2048)
    draft.put("resources.gpus", 1)


def _method(draft: Draft) -> str:
    stage = str(draft.get("stage", "sft"))
    if stage == "ppo":
        raise UserError(
            f"{draft.origin}: stage is 'ppo', and Baton has no PPO.",
            remedy="Take training.method grpo or rloo with a reward function; see docs/recipe.md.",
        )
    if stage not in STAGES:
        raise draft.wrong("stage", f"one of {', '.join(STAGES)}")
    method, settings = STAGES[stage], Document()
    if stage == "dpo":
        method, settings = _preference(draft)
    draft.put("training.method", method, "stage")
    for name, value in settings.items():
        draft.put(f"training.{method}.{name}", value)
    fill(draft, METHODS)
    if method == "reward":
        draft.changed("stage", "the score comes from a sequence classifier, not from a value head beside the model")
    return method


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
            draft.carry("training.dpo.loss_weights", key)
            draft.changed(key, f"added as loss {name}, whose mean is TRL's: over the batch's tokens, not per answer")
    if draft.has("dpo_label_smoothing"):
        nearest = f"{{loss: robust, label_smoothing: {draft.get('dpo_label_smoothing')}}}"
        draft.left("dpo_label_smoothing", f"sigmoid takes none here; training.dpo: {nearest} is the nearest")
    if len(losses) > 1:
        settings = {"loss": losses, "loss_weights": shares}
    return method, settings


def _finetuning(draft: Draft) -> str:
    kind = str(draft.get("finetuning_type", "lora"))
    if kind == "lora":
        _lora(draft)
    elif kind == "freeze":
        _freeze(draft)
    elif kind == "full":
        draft.carry("adapter", "finetuning_type")
    else:
        raise draft.wrong("finetuning_type", "lora, freeze or full, which Baton has", "Choose one of them.")
    return kind


def _lora(draft: Draft) -> None:
    rank = read(draft, "lora_rank", whole, 8)
    draft.put("adapter.type", "lora", "finetuning_type")
    draft.put("adapter.r", rank, "lora_rank")
    draft.put("adapter.alpha", read(draft, "lora_alpha", whole, 2 * rank), "lora_alpha")
    target = read(draft, "lora_target", words, ["all"])
    draft.put("adapter.target_modules", "all-linear" if target == ["all"] else target, "lora_target")
    weights.loraplus(draft, read(draft, "learning_rate", number, 5e-5))


def _freeze(draft: Draft) -> None:
    """Sets the trained layers: the last ones by number, the first ones by their names."""
    key = "freeze_trainable_layers"
    count = int(read(draft, key, number, 2))
    if abs(count) > 1000:
        raise draft.wrong(key, "a number of layers")
    if count > 0:
        draft.put("training.trainable.last_layers", count, key, "finetuning_type")
    patterns = []
    if count < 0:
        first = "|".join(str(at) for at in range(-count))
        patterns.append(rf"\.(layers|h|blocks)\.({first})\.")
        draft.changed(key, "the first blocks by their names; check the pattern against the model's parameter names")
    extra = read(draft, "freeze_extra_modules", words, [])
    patterns += [re.escape(name) for name in extra]
    if patterns:
        draft.put("training.trainable.patterns", patterns, key, "freeze_extra_modules", "finetuning_type")
    if draft.get("freeze_trainable_modules", "all") == "all":
        draft.carry("training.trainable", "freeze_trainable_modules")
    else:
        draft.left("freeze_trainable_modules", "whole blocks are trained; give their parts in trainable.patterns")
    if not count and not patterns:
        raise draft.wrong(key, "a number of layers other than 0, or freeze_extra_modules")


def _precision(draft: Draft, kind: str) -> None:
    """Sets types: what is frozen is held in the short type, what is trained in 32 bits unless `pure_bf16`."""
    pure = read(draft, "pure_bf16", flag, False)
    short = next((name for name in ("bf16", "fp16") if read(draft, name, flag, False)), "fp32")
    weights.precision(draft, "fp32" if pure else short, "bf16", "fp16")
    if pure:
        draft.put("model.dtype", "bfloat16", "pure_bf16")
    elif kind == "lora" and short != "fp32":
        draft.put("model.dtype", {"bf16": "bfloat16", "fp16": "float16"}[short])
    draft.rest("pure_bf16")


def _quantization(draft: Draft) -> None:
    method = str(draft.get("quantization_method", "bnb"))
    if draft.has("quantization_bit") and method not in ("bnb", "bitsandbytes"):
        for key in ("quantization_bit", "quantization_method"):
            draft.left(key, "only bitsandbytes is there: set model.quantization; weights are whole here")
        return
    bits = read(draft, "quantization_bit", whole)
    if bits not in (None, 4, 8):
        draft.left("quantization_bit", "bitsandbytes has 4 and 8 bits: set model.quantization; weights are whole here")
        return
    if weights.quantization(draft, bits, "quantization_bit", "quantization_method") and bits == 4:
        kind = str(draft.get("quantization_type", "nf4"))
        draft.put("model.quantization.type", kind, "quantization_type")
        double = read(draft, "double_quantization", flag, True)
        draft.put("model.quantization.double", double, "double_quantization")


def _attention(draft: Draft) -> None:
    chosen = str(draft.get("flash_attn"))
    if chosen in ATTENTION:
        draft.put("model.attention", ATTENTION[chosen], "flash_attn")
    elif chosen == "auto":
        draft.carry("model.attention", "flash_attn")
