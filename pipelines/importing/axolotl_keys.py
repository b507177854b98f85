"""What becomes of axolotl's keys."""

from __future__ import annotations

from typing import get_args

from baton.components.shared.recipe import GRPO
from baton.pipelines.importing import tokens
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import choice, count, flag, number, numbers, read, text, whole, words
from baton.pipelines.importing.shared_keys import SHARED
from baton.pipelines.importing.table import Carried, switch, table

START = choice(("gaussian", "orthogonal"), {}, "no such start; adapter.init says how matrices start")
LOSS = choice(get_args(GRPO.model_fields["loss"].annotation), {}, "no such loss; dapo is used")
ORDER = "the order of rows is drawn from seed"

METHODS = table(
    {
        "rl_beta": Carried("training.{method}.beta", number, methods=("dpo", "kto", "orpo", "cpo")),
        "dpo_beta": Carried("training.dpo.beta", number),
        "dpo_use_weighting": Carried("training.dpo.weighting", flag),
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
                whole: "num_generations max_completion_length num_iterations",
            }.items()
            for name in names.split()
        },
        "trl.top_k": Carried("training.grpo.top_k", lambda value: count(max(number(value), 0))),
        "trl.mask_truncated_completions": Carried("training.grpo.mask_truncated", flag),
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
        "bnb_config_kwargs.bnb_4bit_use_double_quant": Carried("model.quantization.double", flag),
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
            "adapter.layers_to_transform", lambda value: [count(layer) for layer in words(value)]
        ),
        "peft_init_lora_weights": Carried("adapter.init", lambda value: None if value is True else START(value)),
        "sequence_len": Carried("data.max_length", whole),
        "dataset_exact_deduplication": Carried("data.quality.duplicates", lambda value: "fix" if flag(value) else None),
        "eval_batch_size": Carried("evaluation.batch_size", whole),
        "eval_max_new_tokens": Carried("evaluation.max_new_tokens", whole),
        "merge_lora": Carried("export.formats", lambda value: ["safetensors"] if flag(value) else None),
        "use_tensorboard": Carried("tracking.tensorboard", flag),
        "wandb_project": Carried("tracking.wandb", text),
        "mlflow_tracking_uri": Carried("tracking.mlflow", text),
        "mlflow_experiment_name": Carried("tracking.experiment", text),
        "plugins": _plugins,
        "special_tokens tokens added_tokens_overrides eot_tokens": tokens.settle,
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
