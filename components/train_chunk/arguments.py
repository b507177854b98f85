"""From the recipe to `TrainingArguments`: what every method shares."""

from __future__ import annotations

import os
from typing import Any

from components.shared.plan import Plan
from components.shared.recipe import Recipe


def training_arguments(recipe: Recipe, plan: Plan, output_dir: str) -> dict[str, Any]:
    """Returns keyword arguments for the method's configuration class.

    The run's total steps are given, never a chunk's: schedules and order of rows are those of one
    uninterrupted run, and chunks stop it from outside.
    """
    training = recipe.training
    return {
        "output_dir": output_dir,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "max_steps": plan.num_steps,
        "per_device_train_batch_size": training.micro,
        "per_device_eval_batch_size": recipe.evaluation.batch_size or training.micro,
        "gradient_accumulation_steps": training.accumulation,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "optim": training.optimizer,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "gradient_checkpointing": training.gradient_checkpointing,
        "logging_strategy": "steps",
        "logging_steps": training.log_every,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "steps" if recipe.evaluation.every else "no",
        "eval_steps": recipe.evaluation.every,
        "dataloader_num_workers": training.workers,
        "dataloader_pin_memory": recipe.resources.gpus > 0,
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_deterministic(threads: int | None, deterministic: bool) -> None:
    """Sets what bits depend on, before anything is computed.

    Args:
        threads: CPU threads of torch; its own choice when None.
        deterministic: Refuse kernels whose result varies from call to call.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    # On, it fills each new tensor with NaN to catch kernels that read what they did not write; on the CPU that took
    # a third of a small model's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
