"""axolotl's training files as recipes: keys, methods, weights and precision."""

from __future__ import annotations

import os
import re
from typing import Literal

from baton.errors import UserError
from baton.importers import axolotl_rows, common
from baton.importers.draft import Document, KeyResult, RecipeDraft
from baton.importers.files import OtherTrainer
from baton.importers.parse import (
    boolean,
    choice,
    fill,
    is_on,
    non_negative_int,
    number,
    numbers,
    positive_int,
    read,
    tables,
    text,
    words,
)
from baton.recipe.methods import GRPO, SPECS

ORDER = "the order of rows is drawn from seed"

START = choice(Literal["gaussian", "orthogonal"], "no such start; adapter.init says how matrices start")

TABLES = tables(
    "axolotl",
    {
        "dtype": lambda value: text(value).removeprefix("torch."),
        "fix": lambda value: "fix" if boolean(value) else None,
        "grpo_loss": choice(GRPO.model_fields["loss"].annotation, "no such loss; dapo is used"),
        "layers": lambda value: [non_negative_int(layer) for layer in words(value)],
        "merged": lambda value: ["safetensors"] if boolean(value) else None,
        "scale": lambda value: {True: "group", False: "none"}[value] if isinstance(value, bool) else text(value),
        "start": lambda value: None if value is True else START(value),
        "top_k": lambda value: non_negative_int(max(number(value), 0)),
    },
)
PLUGINS = ("liger", "lm_eval", "cut_cross_entropy", "kernels", "swanlab")
"""Parts of the names of plugins that nothing is lost without, or that have a setting here."""


def _plugins(draft: RecipeDraft, key: str) -> None:
    names = read(draft, key, words, [])
    others = [name for name in names if not any(known in name.lower() for known in PLUGINS)]
    if any("liger" in name.lower() for name in names):
        draft.put("training.liger", True, key)
    if any("lm_eval" in name.lower() for name in names):
        draft.carry("evaluation.tasks", key)
    if others:
        draft.unsupported(key, f"{', '.join(others)}: Baton runs no plugins; the user's own code goes into hooks")
    elif not draft.is_handled(key):
        draft.not_needed(key, "kernels: they change the speed, not the result; see training.liger")


def _shuffled(draft: RecipeDraft, key: str) -> None:
    draft.not_needed(key, ORDER) if draft.get(key) else draft.unsupported(key, ORDER)


METHODS: dict[str, tuple[str, Document]] = {
    "dpo": ("dpo", {}),
    "ipo": ("dpo", {"loss": ["ipo"]}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "simpo": ("cpo", {"loss": "simpo"}),
    "grpo": ("grpo", {}),
}
"""`rl` → method and settings."""

MICRO = "micro_batch_size"
RATE = 2e-5
"""Default learning rate."""

ATTENTION = {"flash": "flash_attention_2", "sdp": "sdpa", "flex": "flex_attention", "eager": "eager"}
"""Short name → attention; the short name and `_attention` make the key that turns it on."""


def _choose(draft: RecipeDraft) -> tuple[str, Document]:
    """Returns the training method, and the settings that its name implies."""
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


def _dpo(draft: RecipeDraft) -> None:
    losses = draft.peek("training.dpo.loss", ["sigmoid"])
    share = read(draft, "rpo_alpha", number, 0.0)
    if share:
        shares = draft.peek("training.dpo.loss_weights", [1.0] * len(losses))
        losses = [*losses, "sft"]
        draft.put("training.dpo.loss", losses, "rpo_alpha")
        draft.put("training.dpo.loss_weights", [*shares, share])
    key = "dpo_label_smoothing"
    if draft.has(key) and ("robust" in losses or "exo_pair" in losses):
        draft.put("training.dpo.label_smoothing", read(draft, key, number), key)
    elif draft.has(key):
        draft.unsupported(key, f"has an effect only with training.dpo.loss robust or exo_pair, not {', '.join(losses)}")


def _grpo(draft: RecipeDraft) -> None:
    """Sets the rewards: axolotl finds functions by `module.function`, in the folder it runs in."""
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
    paths = [draft.relative(f"{name}.py") for name in modules]
    files = [path for path in paths if os.path.exists(os.path.join(draft.target, path))]
    if len(files) == len(modules) == 1:
        draft.put("hooks.source", files[0])
    else:
        imported = ", ".join(modules)
        draft.changed(key, f"the code of {imported} must be in the image, or in the file or folder of hooks.source")
    sync, steps, share = "trl.sync_ref_model", "trl.ref_model_sync_steps", "trl.ref_model_mixup_alpha"
    if draft.has(sync) and (draft.has("adapter") or not draft.peek("training.grpo.beta")):
        draft.unsupported(sync, "the reference follows only full weights, with beta above 0")
    elif draft.has(sync):
        every, mix = read(draft, steps, positive_int, 64), read(draft, share, number, 0.9)
        draft.put("training.grpo.sync_reference", {"every": every, "mix": mix}, sync, steps, share)
    common.fit_generations(draft, draft.peek("training.grpo.num_generations", 8), MICRO)


def _weights(draft: RecipeDraft, method: str) -> None:
    if method == "dpo":
        _dpo(draft)
    if method == "grpo":
        _grpo(draft)
    _adapter(draft)
    _precision(draft)
    keys = [key for key in ("load_in_8bit", "load_in_4bit") if read(draft, key, boolean, False)]
    bits = 8 if "load_in_8bit" in keys else 4 if keys or draft.get("adapter") == "qlora" else None
    if common.quantization(draft, bits, "load_in_8bit", "load_in_4bit"):
        fill(draft, TABLES["four_bits"])
    if draft.has("unfrozen_parameters"):
        _unfrozen(draft)
    _groups(draft)


def _adapter(draft: RecipeDraft) -> None:
    kind = draft.get("adapter")
    if not kind:
        draft.ignore("adapter")
        return
    if kind not in ("lora", "qlora"):
        raise draft.wrong("adapter", "lora or qlora, which Baton has", "Choose one of them, or leave adapter empty.")
    common.lora(draft, "adapter", "lora_r", alpha=8, rate=RATE)
    linear, modules = "lora_target_linear", "lora_target_modules"
    if read(draft, linear, boolean, False):
        draft.put("adapter.target_modules", "all-linear", linear)
        if draft.has(modules):
            draft.not_needed(modules, f"{linear} takes all linear layers")
    elif draft.has(modules):
        pattern = draft.get(modules)
        target = pattern if isinstance(pattern, str) else read(draft, modules, words)
        draft.put("adapter.target_modules", target, modules)


def _precision(draft: RecipeDraft) -> None:
    """Sets types: axolotl holds all weights in the type it computes in."""
    pure = next((name for name in ("bfloat16", "float16", "float32") if is_on(draft, name)), None)
    keys = ("bf16", "fp16")
    if pure and not any(map(draft.has, keys)):
        draft.put("model.dtype", pure, pure)
        common.precision(draft, "fp32", *keys)
        return
    auto = draft.get("bf16", "auto") == "auto"
    half = read(draft, "fp16", boolean, False)
    wanted = "bf16" if not auto and read(draft, "bf16", boolean) else "fp16" if half else "bf16" if auto else "fp32"
    common.precision(draft, wanted, *keys)
    if wanted == "bf16" or (wanted == "fp16" and draft.peek("adapter") is not None):
        draft.put("model.dtype", common.DTYPES[wanted])
    if wanted == "bf16" and draft.get("bf16") == "auto":
        draft.changed("bf16", "taken as bf16, which needs an Ampere GPU or a newer one; fp16 for older ones")
    elif wanted == "bf16" and auto:
        draft.assumed.append("training.precision bf16, model.dtype bfloat16")


def _groups(draft: RecipeDraft) -> None:
    """Sets the parameters with their own learning rate."""
    rate = read(draft, "learning_rate", number, RATE)
    groups: list[Document] = [*draft.peek("training.groups", [])]
    if draft.has("lr_groups"):
        groups += read(draft, "lr_groups", _groups_of, [])
        draft.carry("training.groups", "lr_groups")
    own = read(draft, "embedding_lr", number) or rate * read(draft, "embedding_lr_scale", number, 0)
    if own:
        groups.append({"pattern": "embed_tokens|lm_head", "learning_rate": float(f"{own:.12g}")})
        draft.carry("training.groups", "embedding_lr", "embedding_lr_scale")
    if groups:
        draft.put("training.groups", groups)


def _groups_of(value: object) -> list[Document]:
    """Returns groups of parameters from axolotl's: name, parts of parameter names, rate."""
    keys = {"modules", "lr"}
    if not isinstance(value, list) or not all(isinstance(group, dict) and keys <= group.keys() for group in value):
        raise ValueError("groups of name, modules and lr")
    patterns = ["|".join(re.escape(name) for name in words(group["modules"])) for group in value]
    return [
        {"pattern": pattern, "name": str(group.get("name", pattern)), "learning_rate": number(group["lr"])}
        for pattern, group in zip(patterns, value, strict=True)
    ]


def _unfrozen(draft: RecipeDraft) -> None:
    """Sets the trained parameters: axolotl matches its patterns at the start of a name."""
    key = "unfrozen_parameters"
    if draft.peek("adapter") is not None:
        draft.unsupported(key, "an adapter freezes the weights; whole layers beside it: adapter.modules_to_save")
        return
    patterns = []
    for pattern in read(draft, key, words, []):
        whole_name = re.sub(r"\[\d*:?\d*\]$", "", pattern)
        if whole_name != pattern:
            draft.changed(key, f"{pattern}: a part of a parameter cannot be trained alone, so all of it is")
        patterns.append(whole_name if whole_name.startswith("^") else f"^{whole_name}")
    draft.put("training.trainable.patterns", patterns, key)


def _arithmetic(draft: RecipeDraft, method: str) -> None:
    """Sets attention, recomputation, and the floor of a cosine."""
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
        draft.not_needed(key, "lr_scheduler is not cosine")
    elif draft.has(key):
        draft.put("training.lr_scheduler", "cosine_with_min_lr", "lr_scheduler", key)
        draft.put("training.lr_scheduler_options", {"min_lr_rate": read(draft, key, number)})


def _recomputation(draft: RecipeDraft, method: str) -> None:
    """Sets recomputation and offloading of activations, where the method's trainer has them."""
    key, asked = "gradient_checkpointing", "activation_offloading"
    value = draft.get(key)
    offloads = value in ("offload", "offload_disk", "unsloth")
    if value is not None:
        draft.put("training.gradient_checkpointing", offloads or read(draft, key, boolean, False), key)
    if SPECS[method].offloads_activations:
        if offloads or draft.has(asked):
            draft.put("training.activation_offloading", True, asked)
        if value == "offload_disk":
            draft.changed(key, "activations go to the host's memory, not to a disk")
        return
    if offloads:
        draft.changed(key, f"activations are computed again, not offloaded: {method}'s trainer keeps them there")
    if draft.has(asked):
        draft.unsupported(asked, f"{method}'s trainer does not offload; take gradient_checkpointing: true")


METRICS = {"sacrebleu": "bleu", "chrf": "chrf"}


def _samples(draft: RecipeDraft) -> None:
    """Sets the samples that the model writes, in axolotl at each evaluation."""
    if is_on(draft, "generate_samples"):
        fill(draft, TABLES["samples"])
        if not read(draft, "generation_do_sample", boolean, True):
            draft.put("evaluation.temperature", 0.0)
        draft.carry("evaluation.temperature", "generation_do_sample")
        _sample_every(draft, "generate_samples")
    draft.ignore("generate_samples")
    if draft.has("eval_table_size") and not draft.peek("evaluation.samples"):
        draft.put("evaluation.samples", read(draft, "eval_table_size", positive_int), "eval_table_size")
        _sample_every(draft, "eval_table_size")
    else:
        draft.drop("eval_table_size", "generate_samples decides", KeyResult.not_needed)


def _sample_every(draft: RecipeDraft, key: str) -> None:
    draft.carry("evaluation.samples", key)
    if every := draft.peek("evaluation.every"):
        draft.put("evaluation.sample_every", every)
    else:
        draft.changed(key, "written before and after training; in between: evaluation.sample_every in steps")


def _metrics(draft: RecipeDraft, method: str) -> None:
    key, which = "do_causal_lm_eval", "eval_causal_lm_metrics"
    if not is_on(draft, key) or SPECS[method].rows != "sequences":
        draft.drop(key, f"has no effect with {method}", KeyResult.not_needed)
        return
    wanted = read(draft, which, words, []) or ["sacrebleu", "comet", "ter", "chrf"]
    metrics = [METRICS[name] for name in wanted if name in METRICS]
    if metrics:
        draft.put("evaluation.metrics", list(dict.fromkeys(metrics)))
        draft.changed(key, "over evaluation.samples held-out rows, before and after training, not at each evaluation")
    draft.carry("evaluation.metrics", key, which)
    if others := [name for name in wanted if name not in (*METRICS, "perplexity")]:  # which every evaluation has
        draft.unsupported(
            which if draft.has(which) else key,
            f"{', '.join(others)}: Baton has none; functions of your own go into evaluation.functions",
        )


def _evaluation_tasks(draft: RecipeDraft) -> None:
    """Sets the harness's tasks, `name` or `name:examples` in axolotl."""
    key = "lm_eval_tasks"
    tasks = [task.partition(":") for task in read(draft, key, words, [])]
    if not tasks:
        draft.ignore(key)
        return
    draft.put("evaluation.tasks.names", list(dict.fromkeys(name for name, _, _ in tasks)), key)
    shots = {examples for _, _, examples in tasks}
    if len(shots) > 1 or not all(examples.isdecimal() for examples in shots - {""}):
        draft.changed(key, "one number of examples is for all tasks: evaluation.tasks.few_shot; their own are used")
    elif examples := "".join(shots):
        draft.put("evaluation.tasks.few_shot", int(examples))


KEYS = {
    **common.TABLES["keys"],
    **TABLES["keys"],
    **dict.fromkeys(("special_tokens", "tokens", "added_tokens_overrides", "eot_tokens"), common.settle_tokens),
    "plugins": _plugins,
    "shuffle_merged_datasets": _shuffled,
}
"""All keys but those of the methods' own settings."""


def _convert(draft: RecipeDraft) -> None:
    # In this order: later steps look at the recipe that earlier ones have begun.
    method = common.begin(draft, *_choose(draft), TABLES["methods"])
    common.batch(draft, MICRO, 1, "batch_size")
    common.fit_memory(draft, method)
    common.length(draft, "num_epochs", 1.0)
    common.warmup(draft)
    draft.assume("training.warmup_steps", 0.03)
    if method == "kto":
        common.fit_kto(draft, MICRO)
    _weights(draft, method)
    axolotl_rows.data(draft, method)
    common.held_out(draft, "val_set_size")
    common.by_epoch(draft, "evals_per_epoch", "saves_per_epoch")
    common.evaluations(draft, by_default=True)
    common.checkpoints(draft)
    common.early_stopping(draft, "early_stopping_patience")
    common.best(draft)
    common.order(draft, method)
    _arithmetic(draft, method)
    common.betas(draft)
    common.compilation(draft)
    _samples(draft)
    _metrics(draft, method)
    _evaluation_tasks(draft)
    if draft.has("hub_model_id"):
        common.push(draft, "hub_model_id")
    assumed = {"training.lr_scheduler": "cosine", "training.optimizer": "adamw_torch_fused"}
    common.finish(draft, KEYS, "lr_scheduler", assumed)


TRAINER = OtherTrainer(
    tool="axolotl",
    model="base_model",
    nested=("datasets", "test_datasets", "pretraining_dataset", "trl", "bnb_config_kwargs"),
    convert=_convert,
)
