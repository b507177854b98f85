"""Settings of an attached trainer: the target of a chunk, whether it can be exact, its plan and cadence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import has_length

from baton.errors import UserError
from baton.models import rng
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.plan import Plan
from baton.runs.run import Run

Target = int | float | str | tuple[int, int] | None
"""A step, a share of the run, or chunk k of n as `(k, n)` or `"k/n"`; None is the whole run."""

FORMS = "expected a step such as 100, a share such as 0.25, or chunk k of n as (k, n) or 'k/n'"


def resolve_target(target: Target, num_steps: int) -> tuple[int, int | None]:
    """Returns the step of a target, and the chunk's number if the target has one."""
    if target is None:
        return num_steps, None
    if isinstance(target, str | tuple | list):
        try:
            index, count = (int(part) for part in (target.split("/") if isinstance(target, str) else target))
        except (ValueError, TypeError):
            raise UserError(f"target is {target!r}; {FORMS}.") from None
        if not 1 <= index <= count <= num_steps:
            raise UserError(
                f"target {target!r} is chunk {index} of {count} in a run of {num_steps} steps; expected 1 ≤ k ≤ n ≤ "
                f"{num_steps}."
            )
        return -(-num_steps * index // count), index  # as `runs.plan` cuts a run
    if isinstance(target, bool) or not isinstance(target, int | float):
        raise UserError(f"target is {target!r}; {FORMS}.")
    if isinstance(target, float):
        if not 0 < target <= 1:
            raise UserError(f"target {target!r} is no share of a run; expected more than 0 and at most 1.0.")
        return math.ceil(num_steps * target), None
    if not 1 <= target <= num_steps:
        raise UserError(
            f"target is step {target}, and the run has {num_steps} steps; expected 1 to {num_steps}.",
            remedy="The trainer's max_steps or num_train_epochs say how long the run is, whatever its chunks.",
        )
    return target, None


CADENCES = ("checkpoint_every", "checkpoints_per_epoch")
WITHOUT_EFFECT = {
    "count": ("the target says where a chunk ends", "Give attach a target, such as `(1, 4)`."),
    **dict.fromkeys(
        ("extra", "spare"), ("the script says how many chunks there are", "Attach once more where a chunk ended early.")
    ),
    "retries": ("nothing starts a script again in its process", "Start the script again: it resumes."),
    "keep.audit": ("`baton audit` trains a recipe's chunks again, and there is none", "Leave it out."),
    "signing.secret": (
        "Baton mounts no Secret for a script",
        "Mount it, name the file in BATON_SIGNING_KEY_FILE, and leave chunks.signing.secret out.",
    ),
}
"""Settings of `chunks` without use for a script's chunk → reason and remedy."""


def require_exact(trainer: Trainer) -> None:
    """Raises `UserError` for a trainer whose chunks cannot be exact."""
    if not isinstance(trainer, Trainer):
        raise UserError(
            f"attach was given a {type(trainer).__name__}; expected a transformers.Trainer, or one of TRL's trainers."
        )
    args, rows = trainer.args, trainer.train_dataset
    for is_so, problem, remedy in (
        (rows is None, "it has no train_dataset", "Give it one."),
        (
            args.world_size > 1,
            f"{args.world_size} processes train together",
            "Train in one process, or write a recipe: Baton's own chunks train in several.",
        ),
        (
            args.world_size == 1 and args.n_gpu > 1,
            f"torch's DataParallel would split each batch over {args.n_gpu} GPUs",
            "Choose one by CUDA_VISIBLE_DEVICES.",
        ),
        (trainer.is_deepspeed_enabled, "DeepSpeed's checkpoints are unpickled to be read", "Leave args.deepspeed out."),
        (trainer.is_fsdp_enabled, "FSDP splits the state over processes", "Leave args.fsdp out."),
        (
            args.ignore_data_skip,
            "args.ignore_data_skip begins each chunk with the first rows again",
            "Set it to False.",
        ),
        (
            args.auto_find_batch_size,
            "args.auto_find_batch_size lets each process find another batch size",
            "Give per_device_train_batch_size the size that fits.",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),
            "args.enable_jit_checkpoint saves in the middle of a step",
            "Set it to False: a chunk that is told to end saves at the step's end.",
        ),
        (getattr(args, "use_vllm", False), "vLLM draws its completions from a state of its own", "Set use_vllm=False."),
        (trainer.model_init is not None, "model_init makes a new model when training begins", "Give a model."),
        (
            isinstance(rows, torch.utils.data.IterableDataset) and not hasattr(rows, "state_dict"),
            f"{type(rows).__name__} is a stream without state_dict",
            "Take a datasets.IterableDataset, or rows with a length.",
        ),
        (
            args.load_best_model_at_end and args.metric_for_best_model not in (None, "loss", "eval_loss"),
            f"load_best_model_at_end by {args.metric_for_best_model!r}: the store keeps the best by eval_loss",
            "Set load_best_model_at_end=False, and keep what you choose from by save_total_limit.",
        ),
    ):
        if is_so:
            raise UserError(f"this trainer cannot be trained in exact chunks: {problem}.", remedy=remedy)


def attached_plan(trainer: Trainer) -> Plan:
    with rng.undisturbed():
        loader = trainer.get_train_dataloader()
        values = trainer.set_initial_training_values(trainer.args, loader)
    # Accelerate keeps each loader it prepares; training is to find its own alone.
    loaders = trainer.accelerator._dataloaders
    loaders[:] = [each for each in loaders if each is not loader]
    per_epoch, num_steps = int(values[1]), int(values[-1])
    rows = len(trainer.train_dataset) if has_length(trainer.train_dataset) else 0
    return Plan(rows=rows, steps_per_epoch=per_epoch, num_steps=num_steps, targets=(num_steps,))


def chunks_section(
    trainer: Trainer, every: int | str | None, num_steps: int, own: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the section `chunks` of a run: its trainer's save settings, overridden by those given to `attach`."""
    args, own = trainer.args, dict(own or {})
    for path, (reason, remedy) in WITHOUT_EFFECT.items():
        outer, _, inner = path.rpartition(".")
        values = own.get(outer) if outer else own
        if isinstance(values, Mapping) and inner in values:
            raise UserError(f"chunks.{path} has no effect here: {reason}.", remedy=remedy)
    twice = [name for name in CADENCES if name in own] if every is not None else []
    if twice:
        raise UserError(
            f"checkpoint_every is {every!r}, and chunks.{twice[0]} is {own[twice[0]]!r}: both say when to save.",
            remedy="Leave one out.",
        )
    section: dict[str, Any] = {}
    if every is not None:
        section["checkpoint_every"] = every
    elif any(name in own for name in CADENCES):
        pass  # in place of the trainer's
    elif args.save_strategy == "steps":
        steps = args.save_steps if args.save_steps >= 1 else num_steps * args.save_steps
        section["checkpoint_every"] = math.ceil(steps)
    elif args.save_strategy == "epoch":
        section["checkpoints_per_epoch"] = 1
    if args.save_total_limit:
        section["keep"] = {"last": args.save_total_limit}
        if isinstance(own.get("keep"), Mapping):
            own["keep"] = {**section["keep"], **own["keep"]}
    return {**section, **own}


def attached_recipe(trainer: Trainer, run: Run, chunks: Mapping[str, Any], *, deterministic: bool) -> Recipe:
    """Returns the recipe that checkpoints, fingerprint, callbacks and store read; its model and data are nobody's."""
    args = trainer.args
    chooses_best = args.load_best_model_at_end or args.save_strategy == "best"
    return load.validate(
        {
            "name": run.name[:63].strip("-"),
            "seed": args.seed,
            "store": {"uri": run.storage.uri()},
            "model": {"base": "attached"},
            "data": {"source": ["attached"]},
            "training": {
                "batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps,
                "micro_batch_size": args.per_device_train_batch_size,
                "deterministic": deterministic,
                "tf32": args.tf32,
                "compile": bool(args.torch_compile),
            },
            "chunks": dict(chunks),
            "evaluation": {"every": 1} if chooses_best else {},
            "export": {"checkpoint": "best"} if chooses_best else {},
            "tracking": {"mlflow": None},
        },
        origin=f"chunks of {run.name}",
    )
