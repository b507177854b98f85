"""Keys that axolotl and LLaMA-Factory have in common, most of them from Transformers' `Trainer`."""

from __future__ import annotations

from baton.pipelines.importing.kinds import choice, count, flag, mapping, names_of, number, positive, steps, words
from baton.pipelines.importing.table import Carried, switch, table

SCHEDULER = choice(
    names_of("lr_scheduler"),
    {},
    "Baton has no such schedule; linear is used. See training.lr_scheduler in docs/recipe.md for the others",
)
OPTIMIZER = choice(
    names_of("optimizer"),
    {"adamw_8bit": "adamw_bnb_8bit", "adamw": "adamw_torch", "adamw_hf": "adamw_torch"},
    "Baton has no such optimizer; adamw_torch is used. See training.optimizer in docs/recipe.md for the others",
)

SHARED = table(
    {
        "trust_remote_code": Carried("model.trust_remote_code", flag),
        "lora_dropout": Carried("adapter.dropout", number),
        "lora_modules_to_save additional_target": Carried("adapter.modules_to_save", words),
        "peft_use_dora use_dora": Carried("adapter.dora", flag),
        "peft_use_rslora use_rslora": Carried("adapter.rslora", flag),
        "learning_rate": Carried("training.learning_rate", number),
        "lr_scheduler lr_scheduler_type": Carried("training.lr_scheduler", SCHEDULER),
        "lr_scheduler_kwargs": Carried("training.lr_scheduler_options", mapping),
        "optimizer optim": Carried("training.optimizer", OPTIMIZER),
        "optim_args": Carried("training.optimizer_options", mapping),
        "adam_epsilon": Carried("training.adam_epsilon", number),
        "weight_decay": Carried("training.weight_decay", number),
        "max_grad_norm": Carried("training.max_grad_norm", number),
        "group_by_length": Carried("training.group_by_length", flag),
        "neftune_noise_alpha noisy_embedding_alpha": Carried("training.neftune_alpha", positive),
        "logging_steps": Carried("training.log_every", steps),
        "dataloader_num_workers": Carried("training.workers", count),
        "seed": Carried("seed", count),
        "gradient_checkpointing torch_compile torch_compile_mode adam_beta1 adam_beta2": switch,
        "eval_steps eval_strategy evaluation_strategy save_strategy save_steps save_total_limit": switch,
    },
    left={
        "write it into the config.json of the base": "rope_scaling model_config overrides_of_model_config",
        "special tokens in the rows' text are read as what they are": "split_special_tokens",
        "name them in model.tokenizer.special_tokens.additional_special_tokens": "new_special_tokens_config",
        "continuing an adapter: merge it into the base, and name the result": "lora_model_dir adapter_name_or_path",
        "give model.attention: eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention": (
            "attn_implementation attention flash_attn"
        ),
        "Baton has no shifted attention; attention is whole": "s2_attention shift_attn",
        "Baton has no training in 8 bits; training.precision says which arithmetic is used": "fp8*",
        "checkpoints are compared by evaluation loss": "metric_for_best_model greater_is_better",
        "how many GPUs is not said here: set resources.gpus and training.parallel (ddp, fsdp, zero2 or zero3); "
        "training.batch_size then counts the rows of all of them together": (
            "deepspeed fsdp* device_map qlora_sharded_model_loading dp_*"
        ),
    },
    elsewhere={
        "checkpoints are always whole, so that training can resume from them": "save_only_model",
        "what a run writes goes to the store; set store, a folder or s3://bucket": "output_dir",
        "Baton resumes by itself: from the newest checkpoint of `baton run --run NAME`": "resume_from_checkpoint",
        "a run is named when it is started: `baton run RECIPE --run NAME`": "run_name mlflow_run_name",
        "Baton logs to MLflow, TensorBoard and Weights & Biases: tracking": (
            "swanlab_* use_swanlab* comet_* use_comet* trackio_* use_trackio* use_otel_metrics otel_metrics_*"
        ),
        "set HF_TOKEN in the environment of `baton run`; for pods, name its Secret in resources.secret_env": (
            "hf_use_auth_token hf_hub_token*"
        ),
        "Kubeflow runs the pods; resources says what they ask for": "ray_* use_ray*",
        "resources says what pods ask for": "resources_per_worker*",
    },
    needless={
        "the processes of a chunk are started and joined by Baton": "ddp*",
        "columns that are not used are never loaded": "remove_unused_columns",
        "changes how activations are recomputed, not the result": "gradient_checkpointing_kwargs use_reentrant_gc",
        "weights are always safetensors": "save_safetensors",
        "the report has the speed": "include_tokens_per_second include_effective_tokens_per_second",
        "Transformers loads that way": "low_cpu_mem_usage",
        "losses are logged by steps: training.log_every": "logging_strategy",
        "embeddings have a row for each token, and are resized where tokens are added": (
            "resize_vocab resize_token_embeddings_to_32x"
        ),
        "tokenizers are the fast ones where there is one": "tokenizer_use_fast use_fast_tokenizer",
        "tokenized data is kept in the store": "dataset_prepared_path tokenized_path",
        "changes how fast rows are tokenized, not the tokens": (
            "dataset_processes dataset_keep_in_memory preprocessing_num_workers preprocessing_batch_size"
        ),
        "rows are tokenized once, into the store": "skip_prepare_dataset streaming buffer_size",
        "is for debugging": "debug print_param_status",
        "is for inference, which is not what a recipe describes": "gradio_* infer_* sglang_* offload_folder*",
        "has no effect without a repository to push to": "hub_*",
    },
)
