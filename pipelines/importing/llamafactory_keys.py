"""What becomes of LLaMA-Factory's keys."""

from __future__ import annotations

from baton.pipelines.importing import tokens
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import flag, number, read, text, whole, words
from baton.pipelines.importing.reading import name_for as project_for
from baton.pipelines.importing.shared_keys import SHARED
from baton.pipelines.importing.table import Carried, switch, table

DRAWN = "samples are drawn by evaluation.temperature and top_p alone, 0 takes the likeliest token"

METHODS = table(
    {
        "pref_beta": Carried("training.{method}.beta", number, methods=("dpo", "kto", "orpo", "cpo")),
        "ld_alpha": Carried("training.dpo.length_desensitization", number),
        "kto_chosen_weight": Carried("training.kto.desirable_weight", number),
        "kto_rejected_weight": Carried("training.kto.undesirable_weight", number),
        "simpo_gamma": Carried("training.cpo.simpo_margin", number),
    }
)
"""Settings of a method's own section."""


def _tracking(draft: Draft, key: str) -> None:
    """Sets where metrics go; with `none`, nowhere."""
    names = read(draft, key, words, [])
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
        logged = "Baton logs to MLflow, TensorBoard and Weights & Biases: tracking"
        draft.left(key, f"{', '.join(others)}: {logged}")


def _beams(draft: Draft, key: str) -> None:
    draft.left(key, DRAWN) if read(draft, key, whole, 1) > 1 else draft.rest(key)


TABLE = SHARED | table(
    {
        "model_name_or_path": Carried("model.base", text),
        "model_revision": Carried("model.revision", lambda value: None if value == "main" else text(value)),
        "moe_aux_loss_coef": Carried("training.router.balance", number),
        "enable_liger_kernel": Carried("training.liger", flag),
        "cutoff_len": Carried("data.max_length", whole),
        "per_device_eval_batch_size": Carried("evaluation.batch_size", whole),
        "export_size": Carried("export.shard_size", lambda value: f"{whole(value)}GB"),
        "report_to": _tracking,
        "num_beams eval_num_beams": _beams,
        "add_tokens add_special_tokens new_special_tokens": tokens.settle,
        "push_to_hub": switch,
    },
    left={
        "Baton has no mixture of depths": "mixture_of_depths",
        "Baton trains with TRL's own code; speed: training.liger, training.compile": "use_unsloth",
        "Baton checkpoints with PyTorch; memory: training.activation_offloading": "use_unsloth_gc",
        "types follow model.dtype; float32 keeps all weights in 32 bits": "upcast_layernorm",
        "types follow model.dtype and training.precision": "upcast_lmhead_output",
        "describe the model in model.from_scratch; as it stands, training starts from base": "train_from_scratch",
        "Baton has no PiSSA; adapter.init says how matrices start": "pissa_*",
        "Baton trains one adapter": "create_new_adapter",
        "Baton does not expand blocks; training.trainable says which are trained": "use_llama_pro",
        "give the loss as hooks.loss": "use_dft_loss label_smoothing_factor",
        "Baton does not have this optimizer; training.optimizer says which is used": (
            "use_adam_mini use_muon use_galore* galore_* use_apollo* apollo_* use_badam* badam_*"
        ),
        "Baton trains with Transformers, not with Megatron": "use_mca",
        "kto's loss depends on the rows per pass; they stay as given": "auto_find_batch_size",
        "give the metric in hooks.metrics": "compute_accuracy",
        "the order of rows is drawn from seed; training.curriculum brings easy ones first": "disable_shuffling",
        "the reference is the start model": "ref_model ref_model_adapters",
        "the reference is the start model, held as the model is": "ref_model_quantization_bit",
        "the evaluate stage writes samples: evaluation.samples": "do_predict",
        "held-out rows are evaluated together": "eval_on_each_dataset",
        "weights are always safetensors": "export_legacy_format",
        DRAWN: "repetition_penalty length_penalty generation_*",
        "give training.trainable": "freeze_language*",
        "GGUF has weights in few bits: export.formats: [safetensors, gguf], export.gguf.types": "export_quantization_*",
    },
    elsewhere={
        "set HF_HOME in resources.env": "cache_dir",
        "what a run hands out goes to the store; set store, a folder or s3://bucket": "export_dir",
        "resources says where pods run": "placement_strategy*",
        "set HF_TOKEN in the environment of the export stage": "hub_token*",
        "Baton reads Hugging Face's hub, folders and S3": "ms_hub_token* om_hub_token*",
    },
    needless={
        "a recipe is there to train": "do_train",
        "has no effect without predict_with_generate": "do_sample temperature top_p top_k max_new_tokens",
        "max_new_tokens decides, for what is generated": "max_length",
        "special tokens are left out of samples": "skip_special_tokens",
        "evaluation.every says when": "do_eval",
        "tokenized data is reused only for the same content and settings": "overwrite_cache",
        "every run has its own folder": "overwrite_output_dir",
        "every run's report has the curves": "plot_loss",
        "tokens are counted when they are made": "include_num_input_tokens_seen",
        "has no effect in training": "use_kv_cache quantization_device_map",
        "changes the speed, not the result": "use_v1_kernels",
        "new tokens begin as the mean of the others": "init_special_tokens",
        "padding never counts": "ignore_pad_token_for_loss",
        "on where there is a GPU": "dataloader_pin_memory",
        "the first step is logged where logging_steps is 1": "logging_first_step",
        "Baton learns from text alone": (
            "media_dir freeze_vision* freeze_multi* image_* video_* audio_* crop_to_patches* use_audio_in_video*"
        ),
        "has no effect with this stage and finetuning_type": (
            "double_quantization dpo_label_smoothing pref_* kto_* lora* freeze_* quantization_* oft_* ppo_* "
            "reward_model*"
        ),
        "is for inference, which is not what a recipe describes": "vllm_*",
        "has no effect on what comes out": "export_*",
    },
)
