"""`training.micro_batch_size: auto`: the most rows per forward pass that memory takes, found once for a run.

On a GPU it is tried: a model that is thrown away trains on the longest rows, with ever fewer of them, until none of it
runs out of memory. On a CPU, where running out ends the process, it is estimated. Neither leaves a trace in what the
chunk then computes: random state and the libraries' own are put back.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
from collections.abc import Callable, Mapping

import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import should_reduce_batch_size

from baton.components.shared.core import events, machine, rng
from baton.components.shared.core.errors import UserError
from baton.components.shared.models import memory, pinned, skeleton
from baton.components.shared.recipe import Recipe
from baton.components.shared.recipe.base import amount
from baton.components.shared.runs.documents.training import MicroBatch
from baton.components.shared.runs.plan import Plan
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.data import samplers
from baton.components.train_chunk.data.tokens import Tokens
from baton.components.train_chunk.trainer import building

logger = logging.getLogger("baton")

USABLE = 0.95
"""Share of a GPU's memory that a trial may fill: rows of other lengths leave holes in it."""
HOST_SHARE = 0.8
"""Share of the host's memory that may be filled."""
STEPS = 2
"""Optimizer steps of a trial: from the second on, the optimizer's state is there too."""


def resolve(context: TrainContext, tokens: Tokens, folders: Mapping[str, str], output_dir: str) -> TrainContext:
    """Finds the micro-batch size of a run whose recipe leaves it open, and notes it; the first note holds for all.

    Args:
        context: The chunk that is about to train.
        tokens: The tokenized rows and the tokenizer.
        folders: Local folders of the models that the recipe names, by role.
        output_dir: A local folder, for trials.

    Returns:
        The chunk with the number in its recipe.

    Raises:
        UserError: not even one row fits.
    """
    recipe = context.recipe
    if recipe.training.micro_batch_size != "auto":
        return context
    # Trials draw random numbers, and the run is to begin as one whose recipe names the size.
    with rng.undisturbed():
        if gpu := machine.gpu():
            room = USABLE * gpu.bytes

            def fits(rows: int) -> bool:
                return _fits_gpu(lambda: _try(with_size(recipe, rows), context.plan, tokens, folders, output_dir), room)

            size, by = largest(recipe, fits), "trial"
        else:
            size, by = largest(recipe, _fits_host(recipe, folders.get(pinned.BASE))), "estimate"
    try:
        context.run.write_once(MicroBatch(micro_batch_size=size, found_by=by, device=gpu.name if gpu else "cpu"))
    except UserError:
        if context.run.read(MicroBatch) is None:  # not another process that was first
            raise
    context = context.resolved_again()
    rows, passes = context.recipe.micro_batch_size_per_process, context.recipe.gradient_accumulation_steps
    logger.info("%d rows per forward pass, %d passes per step, by %s", rows, passes, by)
    events.emit(events.MicroBatch(size=rows, accumulation=passes, found_by=by))
    return context


def largest(recipe: Recipe, fits: Callable[[int], bool]) -> int:
    """Returns the largest divisor of the batch size that fits.

    Raises:
        UserError: none does.
    """
    batch_size = recipe.training.batch_size
    for size in range(batch_size, 0, -1):
        if batch_size % size == 0 and fits(size):
            return size
    raise UserError(
        f"training.micro_batch_size is auto, and not one row of data.max_length {recipe.data.max_length} fits memory.",
        remedy="Set training.gradient_checkpointing, train an adapter, lower data.max_length, or use a larger machine; "
        "`baton validate` shows what takes how much.",
    )


def with_size(recipe: Recipe, size: int) -> Recipe:
    """Returns a recipe with its micro-batch size given as a number."""
    training = recipe.training.model_copy(update={"micro_batch_size": size})
    return recipe.model_copy(update={"training": training})


def _fits_host(recipe: Recipe, base: str | None) -> Callable[[int], bool]:
    local = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": base})})
    model = skeleton.build(local)
    room = min(HOST_SHARE * machine.total_memory(), machine.available_memory())
    if recipe.resources.memory:
        room = min(room, amount(recipe.resources.memory) - amount(recipe.resources.shm or "0"))
    return lambda size: memory.estimate(with_size(local, size), model).total <= room


def _fits_gpu(trial: Callable[[], None], room: float) -> bool:
    """Tells whether some steps of training on the longest rows stay within the room there is."""
    fits = _survives(trial)
    peak = torch.cuda.max_memory_allocated()
    _forget()
    return fits and peak <= room


def _survives(trial: Callable[[], None]) -> bool:
    """Tells whether a trial ends without running out of memory."""
    try:
        trial()
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not should_reduce_batch_size(error):
            raise
        logger.info("that is too much: %s", str(error).partition(".")[0])
        return False
    return True


def _try(recipe: Recipe, plan: Plan, tokens: Tokens, folders: Mapping[str, str], output_dir: str) -> None:
    """Trains a model that is thrown away, with nothing of the user's that could act outside of it."""
    training = {"curriculum": None, "group_by_length": False, "early_stopping": None}
    recipe = recipe.model_copy(
        update={
            "training": recipe.training.model_copy(update=training),
            "hooks": recipe.hooks.model_copy(update={"callbacks": []}),
            "evaluation": recipe.evaluation.model_copy(update={"every": None, "per_epoch": None}),
        }
    )
    setup = building.setup(recipe, plan, tokens, folders, output_dir, evaluates=False)
    size = recipe.micro_batch_size_per_process
    passes = min(2, recipe.gradient_accumulation_steps)  # gradients are there while the second one's activations are
    lengths = samplers.lengths(setup.train)
    longest = sorted(range(len(lengths)), key=lambda row: -lengths[row])[: size * passes]
    rows = [longest[number % len(longest)] for number in range(size * passes)]
    changed = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": passes,
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": None,
        "warmup_steps": 0,
        "logging_strategy": "no",
        "dataloader_num_workers": 0,
    }
    setup = dataclasses.replace(setup, arguments={**setup.arguments, **changed}, train=setup.train.select(rows))
    building.build(setup).train()


def _forget() -> None:
    """Frees what a trial held, and what libraries remember of it."""
    if "bitsandbytes" in sys.modules:
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    # One for the whole process: what a trial has set would hold for the chunk's own trainer.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
