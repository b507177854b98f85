"""axolotl's training files in a recipe's terms: a table of its keys, methods, weights and precision."""

from __future__ import annotations

import os
import re
from typing import get_args

from baton.errors import UserError
from baton.importers import axolotl_rows, common
from baton.importers.common import SHARED
from baton.importers.draft import Document, Draft
from baton.importers.files import Trainer
from baton.importers.parse import (
    Carried,
    boolean,
    choice,
    fill,
    is_on,
    non_negative_int,
    number,
    numbers,
    positive_int,
    read,
    switch,
    table,
    text,
    words,
)
from baton.recipe.methods import GRPO, SPECS

# --- What becomes of axolotl's keys.


START = choice(("gaussian", "orthogonal"), {}, "no such start; adapter.init says how matrices start")
LOSS = choice(get_args(GRPO.model_fields["loss"].annotation), {}, "no such loss; dapo is used")
ORDER = "the order of rows is drawn from seed"

METHOD_KEYS = table(
    {
        "rl_beta": Carried("training.{method}.beta", number, methods=("dpo", "kto", "orpo", "cpo")),
        "dpo_beta": Carried("training.dpo.beta", number),
        "dpo_use_weighting": Carried("training.dpo.weighting", boolean),
        "dpo_loss_type": Carried("training.dpo.loss", words),
        "dpo_loss_weights": Carried("training.dpo.loss_weights", numbers),
        "kto_desirable_weight": Carried("training.kto.desirable_weight", number),
        "kto_undesirable_weight": Carried("training.kto.undesirable_weight", number),
        "orpo_alpha": Carried("training.orpo.beta", number),
        "cpo_alpha": Carried("training.cpo.likelihood", number),
        "simpo_gamma": Carried("training.cpo.simpo_margin", number),
        **{
            f"trl.{name}": Carried(f"training.grpo.{name}", kind)
            for kind, names in {
                number: "beta temperature top_p min_p repetition_penalty epsilon epsilon_high",
                positive_int: "num_generations max_completion_length num_iterations",
            }.items()
            for name in names.split()
        },
        "trl.top_k": Carried("training.grpo.top_k", lambda value: non_negative_int(max(number(value), 0))),
        "trl.mask_truncated_completions": Carried("training.grpo.mask_truncated", boolean),
        "trl.importance_sampling_level": Carried("training.grpo.importance_sampling", text),
        "trl.loss_type": Carried("training.grpo.loss", LOSS),
        "trl.scale_rewards": Carried(
            "training.grpo.scale_rewards",
            lambda value: {True: "group", False: "none"}[value] if isinstance(value, bool) else text(value),
        ),
    }
)
"""Settings of a method's own section."""

BITS_AND_BYTES = table(
    {
        "bnb_config_kwargs.bnb_4bit_quant_type": Carried("model.quantization.type", text),
        "bnb_config_kwargs.bnb_4bit_use_double_quant": Carried("model.quantization.double", boolean),
        "bnb_config_kwargs.bnb_4bit_compute_dtype": Carried(
            "model.quantization.compute_dtype", lambda value: text(value).removeprefix("torch.")
        ),
    }
)
"""Settings of weights in 4 bits."""


PLUGINS = ("liger", "lm_eval", "cut_cross_entropy", "kernels", "swanlab")
"""Parts of the names of plugins that nothing is lost without, or that have a setting here."""


def _plugins(draft: Draft, key: str) -> None:
    """Sets Liger's kernels, and names the plugins that have nothing here."""
    names = read(draft, key, words, [])
    others = [name for name in names if not any(known in name.lower() for known in PLUGINS)]
    if any("liger" in name.lower() for name in names):
        draft.put("training.liger", True, key)
    if any("lm_eval" in name.lower() for name in names):
        draft.carry("evaluation.tasks", key)
    if others:
        draft.left(key, f"{', '.join(others)}: Baton runs no plugins; the user's own code goes into hooks")
    elif not draft.is_handled(key):
        draft.needless(key, "kernels: they change the speed, not the result; see training.liger")


TABLE = SHARED | table(
    {
        "base_model": Carried("model.base", text),
        "model_revision revision_of_model": Carried("model.revision", text),
        "tokenizer_config": Carried("model.tokenizer.base", text),
        "lora_target_parameters": Carried("adapter.target_parameters", words),
        "peft_layers_to_transform": Carried(
            "adapter.layers_to_transform", lambda value: [non_negative_int(layer) for layer in words(value)]
        ),
        "peft_init_lora_weights": Carried("adapter.init", lambda value: None if value is True else START(value)),
        "sequence_len": Carried("data.max_length", positive_int),
        "dataset_exact_deduplication": Carried(
            "data.quality.duplicates", lambda value: "fix" if boolean(value) else None
        ),
        "eval_batch_size": Carried("evaluation.batch_size", positive_int),
        "eval_max_new_tokens": Carried("evaluation.max_new_tokens", positive_int),
        "merge_lora": Carried("export.formats", lambda value: ["safetensors"] if boolean(value) else None),
        "use_tensorboard": Carried("tracking.tensorboard", boolean),
        "wandb_project": Carried("tracking.wandb", text),
        "mlflow_tracking_uri": Carried("tracking.mlflow", text),
        "mlflow_experiment_name": Carried("tracking.experiment", text),
        "plugins": _plugins,
        "special_tokens tokens added_tokens_overrides eot_tokens": common.settle_tokens,
        "default_system_message": Carried("data.system", text),
        "flash_attention sdp_attention flex_attention eager_attention activation_offloading": switch,
        "reward_model process_reward_model batch_size excess_length_strategy unfrozen_parameters": switch,
        "shuffle_merged_datasets": lambda draft, key: (
            draft.needless(key, ORDER) if draft.get(key) else draft.left(key, ORDER)
        ),
    },
    left={
        "put the config.json beside the weights of the base": "base_model_config",
        "model says how the base is loaded": "model_kwargs",
        "training begins from the trained weights here; model.from_scratch makes untrained ones": "reinit_weights",
        "only bitsandbytes is there: model.quantization": "gptq peft quantization*",
        "give adapter.target_modules as a pattern": "peft_layers_pattern",
        "Baton has no ReLoRA": "relora relora_*",
        "has no effect with this rl and adapter": "lr_groups",
        "its form is not known; put the addresses into data.source with side: eval": "test_datasets",
        "its form is not known; put the address into data.source": "pretraining_dataset",
        "short rows stay; remove them before": "min_sample_len",
        "prompt and answer share data.max_length": "max_prompt_len",
        "training.curriculum brings easy rows first": "curriculum_sampling",
        "the loss depends on the rows per pass; they stay as given": "auto_find_batch_size",
        "a callback of hooks.callbacks can stop the run": "loss_watchdog_threshold loss_watchdog_patience",
        "see training.early_stopping": "early_stopping_patience",
        "for MMLU as the LM evaluation harness has it: evaluation.tasks: {names: [mmlu], few_shot: 0}": (
            "do_bench_eval bench_*"
        ),
        "the model that is trained is judged, and the one that training started from": "lm_eval_model",
        "model.attention: sdpa does the same": "xformers_attention",
        "new tokens begin as the mean of the others": "fix_untrained_tokens",
        "see training.optimizer for what there is": "torchdistx_path adam_*",
        "training.trainable says which parameters are trained": "optim_target_modules",
        "the learning rate rises evenly": "lr_quadratic_warmup",
        "see training.lr_scheduler: warmup_stable_decay is the nearest": "cosine_constant_lr_ratio",
        "see training.lr_scheduler_options": "lr_div_factor",
        "see training.lr_scheduler": "jagged_restart*",
        "see training.compile": "torch_compile_*",
        "TRL has it no longer, or it has no effect with this rl": "dpo_*",
        "the model writes with Transformers; Baton runs no vLLM yet": "trl.use_vllm* trl.vllm* vllm*",
        "not a setting of Baton's; see training.grpo in docs/recipe.md": "trl.*",
        "not a setting of Baton's; see adapter in docs/recipe.md": "peft_*",
        "not a setting of Baton's; see model.quantization in docs/recipe.md": "bnb_config_kwargs.*",
        "Baton has no LoftQ; adapter.init says how matrices start": "loftq*",
        "Baton has no LISA; training.trainable says which parameters are trained": "lisa_*",
        "Baton has no tensor, sequence or context parallelism; training.parallel splits weights by fsdp or zero3": (
            "sequence_parallel_degree* tensor_parallel_size* context_parallel_size*"
        ),
        "data.max_samples takes so many rows from the start": "dataset_shard*",
        "Baton does not stretch the context": "use_pose* pose_*",
        "Baton has no quantization-aware training": "qat*",
        "Baton learns from text alone: rows with pictures or sound are refused": "processor_type",
        "experts are held as model.quantization says, where bitsandbytes can": "quantize_moe_experts",
        "texts are tokenized by Transformers, with the template of the tokenizer's files": (
            "tokenizer_use_mistral_common"
        ),
    },
    elsewhere={
        "rows stay in the store; upload them yourself": "push_dataset_to_hub",
        "a chunk is one process": "local_rank",
        "checkpoints stay in the store": "hf_mlflow_log_artifacts",
        "Baton names the run as it is named itself; tracking.wandb is the project": "wandb_*",
    },
    needless={
        "recipes are always strict": "strict",
        "the class follows from the base's config.json": (
            "model_type type_of_model cls_model_config is_falcon* is_llama* is_mistral* is_qwen*"
        ),
        "the class follows from the tokenizer's files": "tokenizer_type",
        "the tokenizer's files say it": "tokenizer_legacy",
        "a reward is one number": "num_labels",
        ORDER: "shuffle_before_merging_datasets",
        "has no effect without do_causal_lm_eval": "eval_causal_lm_metrics",
        "has no effect without generate_samples": "num_generation_samples generation_*",
        "changes how fast tasks are done, not the result": "lm_eval_batch_size",
        "the evaluate stage judges the result": "lm_eval_post_train",
        "padding changes the speed, not the result": "pad_to_sequence_len",
        "held-out rows are packed as the others are": "eval_sample_packing",
        "follows from data.packing": ("sample_packing_* pretraining_sample_concatenation pretrain_multipack*"),
        "changes the speed, not the result; see training.liger and training.compile": (
            "batch_flattening lora_mlp* lora_qkv* lora_o_* cut_cross_entropy* flash_attn_* flash_optimum* unsloth_* "
            "use_kernels use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels experts_implementation "
            "fused_attn_kernel flex_attn_* tiled_mlp*"
        ),
        "training.liger takes all of its kernels": "liger_*",
        "has no effect with this rl and adapter": (
            "train_on_inputs load_in_8bit load_in_4bit rpo_alpha cosine_min_lr_ratio rl_beta* kto_* lora_* loraplus_*"
        ),
        "tracking.wandb says where metrics go": "use_wandb",
        "tracking.mlflow says where metrics go": "use_mlflow",
        "baton drill shows that saving works": "save_first_step",
        "Baton always resumes from the newest checkpoint": "auto_resume_from_checkpoints",
        "PEFT finds it out": "lora_fan_in_fan_out",
        "has no effect on the result": "lora_on_cpu",
        "is for another kind of hardware": "xpu",
        "changes memory, not the result": "gc_steps",
        "changes how fast batches come, not the batches": "dataloader_*",
        "with an adapter the reference is its base": "rl_adapter_ref_model",
        "bf16 or fp16 is given, and decides": "bfloat16 float16 float32",
        "is off": "embedding_lr*",
    },
)


# --- axolotl's training files: what they say, in a recipe's terms.


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
        every, mix = read(draft, steps, positive_int, 64), read(draft, share, number, 0.9)
        draft.put("training.grpo.sync_reference", {"every": every, "mix": mix}, sync, steps, share)
    common.fit_generations(draft, draft.look("training.grpo.num_generations", 8), MICRO)


def _weights(draft: Draft, method: str) -> None:
    if method == "dpo":
        _dpo(draft)
    if method == "grpo":
        _grpo(draft)
    _adapter(draft)
    _precision(draft)
    keys = [key for key in ("load_in_8bit", "load_in_4bit") if read(draft, key, boolean, False)]
    bits = 8 if "load_in_8bit" in keys else 4 if keys or draft.get("adapter") == "qlora" else None
    if common.quantization(draft, bits, "load_in_8bit", "load_in_4bit"):
        fill(draft, BITS_AND_BYTES)
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
    common.lora(draft, "adapter", "lora_r", alpha=8, rate=RATE)
    linear, modules = "lora_target_linear", "lora_target_modules"
    if read(draft, linear, boolean, False):
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
        common.precision(draft, "fp32", *keys)
        return
    auto = draft.get("bf16", "auto") == "auto"
    half = read(draft, "fp16", boolean, False)
    wanted = "bf16" if not auto and read(draft, "bf16", boolean) else "fp16" if half else "bf16" if auto else "fp32"
    common.precision(draft, wanted, *keys)
    if wanted == "bf16" or (wanted == "fp16" and draft.look("adapter") is not None):
        draft.put("model.dtype", common.DTYPES[wanted])
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
    methods=METHOD_KEYS,
    weights=_weights,
    data=axolotl_rows.data,
    arithmetic=_arithmetic,
    results=common.axolotl_results,
    keys=TABLE,
)
