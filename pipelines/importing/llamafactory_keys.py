"""What becomes of each of LLaMA-Factory's keys that stands for itself."""

from __future__ import annotations

from pipelines.importing.draft import Draft
from pipelines.importing.reading import name_for as project_for
from pipelines.importing.rules import (
    OPTIMIZER,
    SCHEDULER,
    SEVERAL_GPUS,
    Rule,
    carry,
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

ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
"""Attention by `flash_attn`."""

CARRIED: dict[str, Rule] = {
    "model_name_or_path": carry("model.base", text),
    "model_revision": carry("model.revision", lambda value: None if value == "main" else text(value)),
    "trust_remote_code": carry("model.trust_remote_code", flag),
    "moe_aux_loss_coef": carry("training.router.balance", number),
    "enable_liger_kernel": carry("training.liger", flag),
    "lora_dropout": carry("adapter.dropout", number, within="adapter"),
    "use_dora": carry("adapter.dora", flag, within="adapter"),
    "use_rslora": carry("adapter.rslora", flag, within="adapter"),
    "additional_target": carry("adapter.modules_to_save", words, within="adapter"),
    "cutoff_len": carry("data.max_length", whole),
    "learning_rate": carry("training.learning_rate", number),
    "lr_scheduler_type": carry("training.lr_scheduler", SCHEDULER),
    "lr_scheduler_kwargs": carry("training.lr_scheduler_options", mapping),
    "optim": carry("training.optimizer", OPTIMIZER),
    "optim_args": carry("training.optimizer_options", mapping),
    "adam_epsilon": carry("training.adam_epsilon", number),
    "weight_decay": carry("training.weight_decay", number),
    "max_grad_norm": carry("training.max_grad_norm", number),
    "group_by_length": carry("training.group_by_length", flag),
    "neftune_noise_alpha": carry("training.neftune_alpha", positive),
    "logging_steps": carry("training.log_every", steps),
    "dataloader_num_workers": carry("training.workers", count),
    "per_device_eval_batch_size": carry("evaluation.batch_size", whole),
    "export_size": carry("export.shard_size", lambda value: f"{whole(value)}GB"),
    "seed": carry("seed", count),
}

NO_EFFECT = "has no effect with this stage and finetuning_type"
TRACKING = "Baton logs to MLflow, TensorBoard and Weights & Biases: tracking"
OTHER_OPTIMIZER = "Baton does not have this optimizer; training.optimizer says which is used"
TOKENS = "the tokenizer is taken as it is: save one with these tokens, and name it in model.tokenizer.base"
SERVING = "is for inference, which is not what a recipe describes"
DRAWN = "samples are drawn by evaluation.temperature and top_p alone, 0 takes the likeliest token"
GENERATING = "has no effect without predict_with_generate"
PICTURES = "Baton learns from text alone"


def _tracking(draft: Draft, key: str) -> None:
    """Sets where metrics go; with `none`, nowhere."""
    names = read(draft, key, words)
    if names == ["none"]:
        draft.put("tracking.mlflow", None, key)
        return
    if "tensorboard" in names:
        draft.put("tracking.tensorboard", True, key)
    if "wandb" in names:
        draft.put("tracking.wandb", project_for(draft.origin), key)
        draft.changed(key, "the project of Weights & Biases has the recipe's name: change tracking.wandb")
    draft.carry("tracking.mlflow", *([key] if "mlflow" in names else []))
    if others := [name for name in names if name not in ("mlflow", "tensorboard", "wandb")]:
        draft.left(key, f"{', '.join(others)}: {TRACKING}")


def _beams(draft: Draft, key: str) -> None:
    draft.left(key, DRAWN) if read(draft, key, whole, 1) > 1 else draft.rest(key)


LEFT: dict[str, Rule] = {
    "adapter_name_or_path": leave("going on from an adapter: merge it into the base, and name the result"),
    "cache_dir": leave("set HF_HOME in resources.env"),
    "resize_vocab": leave(TOKENS),
    "add_tokens": leave(TOKENS),
    "add_special_tokens": leave(TOKENS),
    "new_special_tokens_config": leave(TOKENS),
    "init_special_tokens": leave(TOKENS),
    "split_special_tokens": leave(TOKENS),
    "rope_scaling": leave("write it into the config.json of the base"),
    "shift_attn": leave("Baton has no shifted attention; attention is whole"),
    "mixture_of_depths": leave("Baton has no mixture of depths"),
    "flash_attn": leave("give model.attention: eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention"),
    "use_unsloth": leave("Baton trains with TRL's own code; speed: training.liger, training.compile"),
    "use_unsloth_gc": leave("Baton checkpoints with PyTorch; memory: training.activation_offloading"),
    "upcast_layernorm": leave("types follow model.dtype; float32 keeps all weights in 32 bits"),
    "upcast_lmhead_output": leave("types follow model.dtype and training.precision"),
    "train_from_scratch": leave("describe the model in model.from_scratch; as it stands, training starts from base"),
    "pissa_init": leave("Baton has no PiSSA; adapter.init says how matrices start"),
    "create_new_adapter": leave("Baton trains one adapter"),
    "use_llama_pro": leave("Baton does not expand blocks; training.trainable says which are trained"),
    "use_dft_loss": leave("give the loss as hooks.loss"),
    "use_adam_mini": leave(OTHER_OPTIMIZER),
    "use_muon": leave(OTHER_OPTIMIZER),
    "use_mca": leave("Baton trains with Transformers, not with Megatron"),
    "auto_find_batch_size": leave("kto's loss depends on the rows per pass; they stay as given"),
    "compute_accuracy": leave("give the metric in hooks.metrics"),
    "disable_shuffling": leave("the order of rows is drawn from seed; training.curriculum brings easy ones first"),
    "ref_model": leave("the reference is the start model"),
    "ref_model_adapters": leave("the reference is the start model"),
    "ref_model_quantization_bit": leave("the reference is the start model, held as the model is"),
    "metric_for_best_model": leave("checkpoints are compared by evaluation loss"),
    "greater_is_better": leave("checkpoints are compared by evaluation loss"),
    "label_smoothing_factor": leave("give the loss as hooks.loss"),
    "save_only_model": leave("checkpoints are always whole, so that training can go on from them"),
    "resume_from_checkpoint": leave("Baton goes on by itself: from the newest checkpoint of `baton run --run NAME`"),
    "do_predict": leave("the evaluate stage writes samples: evaluation.samples"),
    "eval_on_each_dataset": leave("held-out rows are evaluated together"),
    "report_to": _tracking,
    "run_name": leave("a run is named when it is started: `baton run RECIPE --run NAME`"),
    "output_dir": leave("what a run writes goes to the store; set store, a folder or s3://bucket"),
    "deepspeed": leave(SEVERAL_GPUS),
    "export_dir": leave("what a run hands out goes to the store; set store, a folder or s3://bucket"),
    "export_legacy_format": leave("weights are always safetensors"),
    "num_beams": _beams,
    "eval_num_beams": _beams,
    "repetition_penalty": leave(DRAWN),
    "length_penalty": leave(DRAWN),
}

DROPPED: dict[str, Rule] = {
    "do_train": drop("a recipe is there to train"),
    **dict.fromkeys(("do_sample", "temperature", "top_p", "top_k", "max_new_tokens"), drop(GENERATING)),
    "max_length": drop("max_new_tokens decides, for what is generated"),
    "skip_special_tokens": drop("special tokens are left out of samples"),
    "do_eval": drop("evaluation.every says when"),
    "overwrite_cache": drop("tokenized data is reused only for the same content and settings"),
    "overwrite_output_dir": drop("every run has a folder of its own"),
    "preprocessing_num_workers": drop("changes how fast rows are tokenized, not the tokens"),
    "preprocessing_batch_size": drop("changes how fast rows are tokenized, not the tokens"),
    "tokenized_path": drop("tokenized data is kept in the store"),
    "streaming": drop("rows are tokenized once, into the store"),
    "buffer_size": drop("rows are tokenized once, into the store"),
    "plot_loss": drop("every run's report has the curves"),
    "include_num_input_tokens_seen": drop("tokens are counted when they are made"),
    "include_tokens_per_second": drop("the report has the speed"),
    "include_effective_tokens_per_second": drop("the report has the speed"),
    "use_fast_tokenizer": drop("tokenizers are the fast ones where there is one"),
    "low_cpu_mem_usage": drop("Transformers loads that way"),
    "use_kv_cache": drop("has no effect in training"),
    "use_reentrant_gc": drop("changes how activations are recomputed, not the result"),
    "gradient_checkpointing_kwargs": drop("changes how activations are recomputed, not the result"),
    "print_param_status": drop("is for debugging"),
    "ignore_pad_token_for_loss": drop("padding never counts"),
    "remove_unused_columns": drop("columns that are not used are never loaded"),
    "dataloader_pin_memory": drop("on where there is a GPU"),
    "save_safetensors": drop("weights are always safetensors"),
    "logging_first_step": drop("the first step is logged where logging_steps is 1"),
    "logging_strategy": drop("losses are logged by steps: training.log_every"),
    "media_dir": drop(PICTURES),
    "double_quantization": drop(NO_EFFECT),
    "quantization_device_map": drop("has no effect in training"),
    "loraplus_lr_ratio": drop(NO_EFFECT),
    "pref_loss": drop(NO_EFFECT),
    "ld_alpha": drop(NO_EFFECT),
    "simpo_gamma": drop(NO_EFFECT),
    "dpo_label_smoothing": drop(NO_EFFECT),
}

TABLE = CARRIED | LEFT | DROPPED

FAMILIES: dict[str, Rule] = {
    "pref_": drop(NO_EFFECT),
    "kto_": drop(NO_EFFECT),
    "lora": drop(NO_EFFECT),
    "freeze_vision": drop(PICTURES),
    "freeze_multi": drop(PICTURES),
    "freeze_language": leave("give training.trainable"),
    "freeze_": drop(NO_EFFECT),
    "quantization_": drop(NO_EFFECT),
    "pissa_": leave("Baton has no PiSSA; adapter.init says how matrices start"),
    "oft_": drop(NO_EFFECT),
    "ppo_": drop(NO_EFFECT),
    "reward_model": drop(NO_EFFECT),
    "use_galore": leave(OTHER_OPTIMIZER),
    "galore_": leave(OTHER_OPTIMIZER),
    "use_apollo": leave(OTHER_OPTIMIZER),
    "apollo_": leave(OTHER_OPTIMIZER),
    "use_badam": leave(OTHER_OPTIMIZER),
    "badam_": leave(OTHER_OPTIMIZER),
    "use_swanlab": leave(TRACKING),
    "swanlab_": leave(TRACKING),
    "fp8": leave("Baton has no training in 8 bits; training.precision says which arithmetic is used"),
    "fsdp": leave(SEVERAL_GPUS),
    "ddp_": drop("the processes of a chunk are started and joined by Baton"),
    "ray_": leave("Kubeflow runs the pods; resources says what they ask for"),
    "resources_per_worker": leave("resources says what pods ask for"),
    "placement_strategy": leave("resources says where pods run"),
    "infer_": drop(SERVING),
    "vllm_": drop(SERVING),
    "sglang_": drop(SERVING),
    "offload_folder": drop(SERVING),
    "export_quantization_": leave(
        "GGUF has weights in few bits: export.formats: [safetensors, gguf], export.gguf.types"
    ),
    "export_": drop("has no effect on what comes out"),
    "image_": drop(PICTURES),
    "video_": drop(PICTURES),
    "audio_": drop(PICTURES),
    "crop_to_patches": drop(PICTURES),
    "use_audio_in_video": drop(PICTURES),
    "hub_token": leave("set HF_TOKEN in the environment of the export stage"),
    "hub_": drop("has no effect without a repository to push to"),
    "hf_hub_token": leave(
        "set HF_TOKEN in the environment of `baton run`; for pods, name its Secret in resources.secret_env"
    ),
    "ms_hub_token": leave("Baton reads Hugging Face's hub, folders and S3"),
    "om_hub_token": leave("Baton reads Hugging Face's hub, folders and S3"),
    "generation_": leave(DRAWN),
}
