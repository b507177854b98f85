"""From the recipe to `TrainingArguments`: what every method shares."""

from __future__ import annotations

import math
import os

from baton.components.shared.recipe import Recipe, Training
from baton.components.shared.runs.plan import Plan
from baton.components.train_chunk import uncompiled
from baton.components.train_chunk.distributed.ranks import Ranks
from baton.components.train_chunk.trainer import sharding
from baton.components.train_chunk.trainer.base import Options


def training_arguments(recipe: Recipe, plan: Plan, output_dir: str) -> Options:
    """Returns keyword arguments for the method's configuration class.

    The run's total steps are given, never a chunk's: schedules and order of rows are those of one
    uninterrupted run, and chunks stop it from outside.
    """
    training, processes = recipe.training, Ranks.here().size
    return {
        "output_dir": output_dir,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "max_steps": plan.num_steps,
        "per_device_train_batch_size": recipe.micro_batch_size_per_process,
        "per_device_eval_batch_size": recipe.evaluation_batch_size,
        # One process that trains alone for several, as the learning-rate finder does, makes the others' passes too; one
        # that has several virtual workers makes theirs.
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps * recipe.workers // processes,
        "logging_strategy": "steps",
        "logging_steps": training.log_every,
        # A loss that is no number is logged as that, and not as an average.
        "logging_nan_inf_filter": False,
        # The checkpoint callback alone says when, by `control.should_save`.
        "save_strategy": "no",
        "eval_strategy": "steps" if recipe.evaluation.in_training else "no",
        # With `per_epoch` those at epochs' ends; `EvaluationsPerEpoch` adds the others.
        "eval_steps": plan.steps_per_epoch if recipe.evaluation.per_epoch else recipe.evaluation.every,
        "dataloader_num_workers": training.workers,
        "dataloader_pin_memory": recipe.resources.gpus > 0,
        "use_cpu": recipe.resources.gpus == 0 and recipe.resources.profile != "mps",
        "report_to": "none",
        "disable_tqdm": True,
        **_optimization(training),
        **_arithmetic(training),
        **_early_stopping(training),
        **(sharding.arguments(recipe) if processes > 1 and not recipe.parallel.virtual_workers else {}),
    }


def _optimization(training: Training) -> Options:
    options = ",".join(f"{name}={value}" for name, value in training.optimizer_options.items())
    clips_groups = any(group.max_grad_norm for group in training.groups)
    return {
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler,
        "lr_scheduler_kwargs": dict(training.lr_scheduler_options) or None,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        # Trainer clips nothing at 0, groups included
        "max_grad_norm": training.max_grad_norm or (math.inf if clips_groups else 0.0),
        "optim": training.optimizer,
        "optim_args": options or None,
        "adam_beta1": training.adam_betas[0],
        "adam_beta2": training.adam_betas[1],
        "adam_epsilon": training.adam_epsilon,
        "neftune_noise_alpha": training.neftune_alpha,
    }


def _arithmetic(training: Training) -> Options:
    mode = sharding.compile_mode(training)
    arithmetic: Options = {
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "gradient_checkpointing": training.gradient_checkpointing,
        "torch_compile": mode is not None,
        "use_liger_kernel": training.liger,
    }
    if mode:
        arithmetic["torch_compile_mode"] = mode
    if training.tf32 is not None or training.precision == "tf32":
        arithmetic["tf32"] = training.tf32 is not False
    return arithmetic


def uses_tf32(recipe: Recipe) -> bool:
    """Returns whether matrix products in 32 bits are rounded: as the recipe says, else as Transformers decides."""
    training = recipe.training
    if training.tf32 is not None or training.precision == "tf32":
        return training.tf32 is not False
    compiles = sharding.compile_mode(training) is not None and recipe.world_size == 1
    return compiles and training.precision != "fp16" and recipe.resources.gpus > 0


def _early_stopping(training: Training) -> Options:
    stopping = training.early_stopping
    if stopping is None:
        return {}
    return {
        "metric_for_best_model": stopping.metric.removeprefix("eval_"),
        "greater_is_better": stopping.greater_is_better,
    }


def make_deterministic(threads: int | None, deterministic: bool, *, tf32: bool = False) -> None:
    """Sets what bits depend on, before anything is computed.

    Args:
        threads: CPU threads of torch; its own choice when None.
        deterministic: Refuse kernels whose result varies from call to call.
        tf32: Round what matrix products read in 32 bits.
    """
    # Read by cuBLAS when it is first used; without it torch refuses deterministic products on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    uncompiled.use_deterministic(deterministic)
    # On, it fills each new tensor with NaN to catch kernels that read what they did not write; on the CPU that took
    # a third of a small model's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if tf32:
        # Before Transformers does it, so that the fingerprint says it when a checkpoint is looked at; and by this call,
        # as after Transformers' alone torch refuses to tell the precision, which `max-autotune` asks for.
        torch.set_float32_matmul_precision("high")
