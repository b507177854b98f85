"""What becomes of each of axolotl's keys that stands for itself."""

from __future__ import annotations

from pipelines.importing.draft import Draft
from pipelines.importing.rules import (
    OPTIMIZER,
    OTHER_SPLITS,
    SCHEDULER,
    SEVERAL_GPUS,
    Rule,
    carry,
    choice,
    count,
    drop,
    flag,
    leave,
    mapping,
    number,
    positive,
    read,
    steps,
    text,
    whole,
    words,
)

START = choice(("gaussian", "orthogonal"), {}, "no such start; adapter.init says how matrices start")


def _layers(value: object) -> list[int]:
    return [count(layer) for layer in words(value)]


CARRIED: dict[str, Rule] = {
    "base_model": carry("model.base", text),
    "model_revision": carry("model.revision", text),
    "revision_of_model": carry("model.revision", text),
    "trust_remote_code": carry("model.trust_remote_code", flag),
    "lora_dropout": carry("adapter.dropout", number, within="adapter"),
    "lora_modules_to_save": carry("adapter.modules_to_save", words, within="adapter"),
    "lora_target_parameters": carry("adapter.target_parameters", words, within="adapter"),
    "peft_layers_to_transform": carry("adapter.layers_to_transform", _layers, within="adapter"),
    "peft_use_dora": carry("adapter.dora", flag, within="adapter"),
    "peft_use_rslora": carry("adapter.rslora", flag, within="adapter"),
    "peft_init_lora_weights": carry(
        "adapter.init", lambda value: None if value is True else START(value), within="adapter"
    ),
    "sequence_len": carry("data.max_length", whole),
    "learning_rate": carry("training.learning_rate", number),
    "lr_scheduler": carry("training.lr_scheduler", SCHEDULER),
    "lr_scheduler_kwargs": carry("training.lr_scheduler_options", mapping),
    "optimizer": carry("training.optimizer", OPTIMIZER),
    "optim_args": carry("training.optimizer_options", mapping),
    "adam_epsilon": carry("training.adam_epsilon", number),
    "weight_decay": carry("training.weight_decay", number),
    "max_grad_norm": carry("training.max_grad_norm", number),
    "group_by_length": carry("training.group_by_length", flag),
    "neftune_noise_alpha": carry("training.neftune_alpha", positive),
    "noisy_embedding_alpha": carry("training.neftune_alpha", positive),
    "logging_steps": carry("training.log_every", steps),
    "dataloader_num_workers": carry("training.workers", count),
    "eval_batch_size": carry("evaluation.batch_size", whole),
    "eval_max_new_tokens": carry("evaluation.max_new_tokens", whole),
    "dataset_exact_deduplication": carry("data.quality.duplicates", lambda value: "fix" if flag(value) else None),
    "seed": carry("seed", count),
    "use_tensorboard": carry("tracking.tensorboard", flag),
    "wandb_project": carry("tracking.wandb", text),
    "mlflow_tracking_uri": carry("tracking.mlflow", text),
    "mlflow_experiment_name": carry("tracking.experiment", text),
    "tokenizer_config": carry("model.tokenizer.base", text),
}

TRACKING = "Baton logs to MLflow, TensorBoard and Weights & Biases: tracking"
TOKENS = "the tokenizer is taken as it is: save one with these tokens, and name it in model.tokenizer.base"
SPEED = "changes the speed, not the result; see training.liger and training.compile"
NO_EFFECT = "has no effect with this rl and adapter"
ATTENTION = "give model.attention: eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention"
CLASS = "the class follows from the base's config.json"
ORDER = "the order of rows is drawn from seed"
PER_EPOCH = "the rows of an epoch are not counted yet; set {} to a number of steps"
BENCH = "for MMLU as the LM evaluation harness has it: evaluation.tasks: {names: [mmlu], few_shot: 0}"


def _plugins(draft: Draft, key: str) -> None:
    """Sets Liger's kernels, and names the plugins that have nothing here."""
    names = read(draft, key, words)
    others = [name for name in names if not any(known in name.lower() for known in ("liger", "lm_eval"))]
    if any("liger" in name.lower() for name in names):
        draft.put("training.liger", True, key)
    if any("lm_eval" in name.lower() for name in names):
        draft.carry("evaluation.tasks", key)
    if others:
        draft.left(key, f"{', '.join(others)}: Baton runs no plugins; the user's own code goes into hooks")


LEFT: dict[str, Rule] = {
    "base_model_config": leave("put the config.json beside the weights of the base"),
    "model_config": leave("write it into the config.json of the base"),
    "overrides_of_model_config": leave("write it into the config.json of the base"),
    "model_kwargs": leave("model says how the base is loaded"),
    "rope_scaling": leave("write it into the config.json of the base"),
    "special_tokens": leave(TOKENS),
    "tokens": leave(TOKENS),
    "added_tokens_overrides": leave(TOKENS),
    "eot_tokens": leave(TOKENS),
    "resize_token_embeddings_to_32x": leave(TOKENS),
    "default_system_message": leave("put it into the rows"),
    "lora_model_dir": leave("going on from an adapter: merge it into the base, and name the result"),
    "gptq": leave("only bitsandbytes is there: model.quantization"),
    "peft": leave("only bitsandbytes is there: model.quantization"),
    "peft_layers_pattern": leave("give adapter.target_modules as a pattern"),
    "relora": leave("Baton has no ReLoRA"),
    "lr_groups": leave(NO_EFFECT),
    "test_datasets": leave("its form is not known; put the addresses into data.source with side: eval"),
    "min_sample_len": leave("short rows stay; remove them before"),
    "max_prompt_len": leave("prompt and answer share data.max_length"),
    "curriculum_sampling": leave("training.curriculum brings easy rows first"),
    "pretraining_dataset": leave("its form is not known; put the address into data.source"),
    "evals_per_epoch": leave(PER_EPOCH.format("evaluation.every")),
    "saves_per_epoch": leave(PER_EPOCH.format("chunks.checkpoint_every") + " or a time; every chunk ends on one"),
    "auto_find_batch_size": leave("the loss depends on the rows per pass; they stay as given"),
    "metric_for_best_model": leave("checkpoints are compared by evaluation loss"),
    "greater_is_better": leave("checkpoints are compared by evaluation loss"),
    "save_only_model": leave("checkpoints are always whole, so that training can go on from them"),
    "loss_watchdog_threshold": leave("a callback of hooks.callbacks can stop the run"),
    "loss_watchdog_patience": leave("a callback of hooks.callbacks can stop the run"),
    "early_stopping_patience": leave("see training.early_stopping"),
    "do_bench_eval": leave(BENCH),
    "lm_eval_model": leave("the model that is trained is judged, and the one that training started from"),
    "attn_implementation": leave(ATTENTION),
    "attention": leave(ATTENTION),
    "xformers_attention": leave("model.attention: sdpa does the same"),
    "s2_attention": leave("Baton has no shifted attention; attention is whole"),
    "fp8": leave("Baton has no training in 8 bits; training.precision says which arithmetic is used"),
    "fix_untrained_tokens": leave("tokens stay as the base has them"),
    "output_dir": leave("what a run writes goes to the store; set store, a folder or s3://bucket"),
    "resume_from_checkpoint": leave("Baton goes on by itself: from the newest checkpoint of `baton run --run NAME`"),
    "deepspeed": leave(SEVERAL_GPUS),
    "fsdp": leave(SEVERAL_GPUS),
    "fsdp_config": leave(SEVERAL_GPUS),
    "device_map": leave(SEVERAL_GPUS),
    "plugins": _plugins,
    "shuffle_merged_datasets": lambda draft, key: (
        draft.needless(key, ORDER) if draft.get(key) else draft.left(key, ORDER)
    ),
    "torchdistx_path": leave("see training.optimizer for what there is"),
    "optim_target_modules": leave("training.trainable says which parameters are trained"),
    "lr_quadratic_warmup": leave("the learning rate rises evenly"),
    "cosine_constant_lr_ratio": leave("see training.lr_scheduler: warmup_stable_decay is the nearest"),
    "lr_div_factor": leave("see training.lr_scheduler_options"),
    "merge_lora": carry("export.formats", lambda value: ["safetensors"] if flag(value) else None),
    "hf_use_auth_token": leave(
        "set HF_TOKEN in the environment of `baton run`; for pods, name its Secret in resources.secret_env"
    ),
    "push_dataset_to_hub": leave("rows stay in the store; upload them yourself"),
    "local_rank": leave("a chunk is one process"),
}

DROPPED: dict[str, Rule] = {
    "strict": drop("recipes are always strict"),
    "model_type": drop(CLASS),
    "type_of_model": drop(CLASS),
    "cls_model_config": drop(CLASS),
    "tokenizer_type": drop("the class follows from the tokenizer's files"),
    "tokenizer_use_fast": drop("tokenizers are the fast ones where there is one"),
    "tokenizer_legacy": drop("the tokenizer's files say it"),
    "processor_type": drop("Baton learns from text alone"),
    "num_labels": drop("a reward is one number"),
    "dataset_prepared_path": drop("tokenized data is kept in the store"),
    "dataset_processes": drop("changes how fast rows are tokenized, not the tokens"),
    "dataset_keep_in_memory": drop("changes how fast rows are tokenized, not the tokens"),
    "skip_prepare_dataset": drop("rows are tokenized once, into the store"),
    "remove_unused_columns": drop("columns that are not used are never loaded"),
    "shuffle_before_merging_datasets": drop(ORDER),
    "eval_causal_lm_metrics": drop("has no effect without do_causal_lm_eval"),
    "num_generation_samples": drop("has no effect without generate_samples"),
    "lm_eval_batch_size": drop("changes how fast tasks are done, not the result"),
    "lm_eval_post_train": drop("the evaluate stage judges the result"),
    "pad_to_sequence_len": drop("padding changes the speed, not the result"),
    "eval_sample_packing": drop("held-out rows are packed as the others are"),
    "sample_packing_sequentially": drop("follows from data.packing"),
    "batch_flattening": drop(SPEED),
    "pretraining_sample_concatenation": drop("follows from data.packing"),
    "train_on_inputs": drop(NO_EFFECT),
    "gradient_checkpointing_kwargs": drop("changes how activations are recomputed, not the result"),
    "use_wandb": drop("tracking.wandb says where metrics go"),
    "use_mlflow": drop("tracking.mlflow says where metrics go"),
    "mlflow_run_name": leave("a run is named when it is started: `baton run RECIPE --run NAME`"),
    "hf_mlflow_log_artifacts": leave("checkpoints stay in the store"),
    "save_safetensors": drop("weights are always safetensors"),
    "save_first_step": drop("baton drill shows that saving works"),
    "auto_resume_from_checkpoints": drop("Baton always goes on from the newest checkpoint"),
    "include_tokens_per_second": drop("the report has the speed"),
    "low_cpu_mem_usage": drop("Transformers loads that way"),
    "lora_fan_in_fan_out": drop("PEFT finds it out"),
    "lora_on_cpu": drop("has no effect on the result"),
    "lora_target_linear": drop(NO_EFFECT),
    "lora_target_modules": drop(NO_EFFECT),
    "qlora_sharded_model_loading": leave(SEVERAL_GPUS),
    "loraplus_lr_ratio": drop(NO_EFFECT),
    "debug": drop("is for debugging"),
    "xpu": drop("is for another kind of hardware"),
    "gc_steps": drop("changes memory, not the result"),
    "logging_strategy": drop("losses are logged by steps: training.log_every"),
    "load_in_8bit": drop(NO_EFFECT),
    "load_in_4bit": drop(NO_EFFECT),
    "orpo_alpha": drop(NO_EFFECT),
    "rpo_alpha": drop(NO_EFFECT),
    "simpo_gamma": drop(NO_EFFECT),
    "cpo_alpha": drop(NO_EFFECT),
    "cosine_min_lr_ratio": drop(NO_EFFECT),
    "rl_adapter_ref_model": drop("with an adapter the reference is its base"),
    "bfloat16": drop("bf16 or fp16 is given, and decides"),
    "float16": drop("bf16 or fp16 is given, and decides"),
    "float32": drop("bf16 or fp16 is given, and decides"),
}

TABLE = CARRIED | LEFT | DROPPED

FAMILIES: dict[str, Rule] = {
    "wandb_": leave("Baton names the run as it is named itself; tracking.wandb is the project"),
    "comet_": leave(TRACKING),
    "use_comet": leave(TRACKING),
    "swanlab_": leave(TRACKING),
    "use_swanlab": leave(TRACKING),
    "trackio_": leave(TRACKING),
    "use_trackio": leave(TRACKING),
    "hub_": drop("has no effect without a repository to push to"),
    "rl_beta": drop(NO_EFFECT),
    "dpo_": leave("TRL has it no longer, or it has no effect with this rl"),
    "kto_": drop(NO_EFFECT),
    "trl.use_vllm": leave("the model writes with Transformers; Baton runs no vLLM yet"),
    "trl.vllm": leave("the model writes with Transformers; Baton runs no vLLM yet"),
    "trl.": leave("not a setting of Baton's; see training.grpo in docs/recipe.md"),
    "vllm": leave("the model writes with Transformers; Baton runs no vLLM yet"),
    "lora_mlp": drop(SPEED),
    "lora_qkv": drop(SPEED),
    "lora_o_": drop(SPEED),
    "lora_": drop(NO_EFFECT),
    "loraplus_": drop(NO_EFFECT),
    "loftq": leave("Baton has no LoftQ; adapter.init says how matrices start"),
    "peft_": leave("not a setting of Baton's; see adapter in docs/recipe.md"),
    "bnb_config_kwargs.": leave("not a setting of Baton's; see model.quantization in docs/recipe.md"),
    "relora_": leave("Baton has no ReLoRA"),
    "lisa_": leave("Baton has no LISA; training.trainable says which parameters are trained"),
    "sample_packing_": drop("follows from data.packing"),
    "pretrain_multipack": drop("follows from data.packing"),
    "liger_": drop("training.liger takes all of its kernels"),
    "cut_cross_entropy": drop(SPEED),
    "flash_attn_": drop(SPEED),
    "flash_optimum": drop(SPEED),
    "unsloth_": drop(SPEED),
    "fsdp_": leave(SEVERAL_GPUS),
    "ddp": drop("the processes of a chunk are started and joined by Baton"),
    "sequence_parallel_degree": leave(OTHER_SPLITS),
    "tensor_parallel_size": leave(OTHER_SPLITS),
    "context_parallel_size": leave(OTHER_SPLITS),
    "dp_": leave(SEVERAL_GPUS),
    "ray_": leave("Kubeflow runs the pods; resources says what they ask for"),
    "use_ray": leave("Kubeflow runs the pods; resources says what they ask for"),
    "resources_per_worker": leave("resources says what pods ask for"),
    "dataloader_": drop("changes how fast batches come, not the batches"),
    "dataset_shard": leave("data.max_samples takes so many rows from the start"),
    "use_pose": leave("Baton does not stretch the context"),
    "pose_": leave("Baton does not stretch the context"),
    "qat": leave("Baton has no quantization-aware training"),
    "quantization": leave("only bitsandbytes is there: model.quantization"),
    "gradio_": drop("is for inference, which is not what a recipe describes"),
    "bench_": leave(BENCH),
    "is_falcon": drop(CLASS),
    "is_llama": drop(CLASS),
    "is_mistral": drop(CLASS),
    "is_qwen": drop(CLASS),
    "torch_compile_": leave("see training.compile"),
    "jagged_restart": leave("see training.lr_scheduler"),
    "adam_": leave("see training.optimizer for what there is"),
    "embedding_lr": drop("is off"),
    "generation_": drop("has no effect without generate_samples"),
}
