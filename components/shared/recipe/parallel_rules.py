"""What several processes can train together."""

from __future__ import annotations

import math

from baton.components.shared.recipe.parallel import MAX_PROCESSES
from baton.components.shared.recipe.sections import Sections

ZERO_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimizers that treat each number by itself, as DeepSpeed hands them all weights as one long row."""


def check_nodes(recipe: Sections) -> None:
    """Checks that a number of nodes that may vary leaves no trace, and that there is one.

    Raises:
        ValueError: it does, or there is none; the message names the remedy.
    """
    nodes, workers, processes = recipe.resources.nodes, recipe.parallel.virtual_workers, recipe.processes
    if isinstance(nodes, int):
        return
    if not workers:
        fitting = min(2 ** (max(2, nodes.max * processes).bit_length() - 1), MAX_PROCESSES)
        raise ValueError(
            f"resources.nodes: from {nodes.min} to {nodes.max} nodes train the same bits with virtual workers alone; "
            f"set training.parallel.virtual_workers, for example to {fitting}, or nodes to a number"
        )
    if not recipe.node_counts:
        powers = [2**power for power in range((workers // processes).bit_length())]
        raise ValueError(
            f"resources.nodes: no number from {nodes.min} to {nodes.max}, times {processes} process(es) on each, "
            f"divides the {workers} virtual workers; let min and max have {' or '.join(map(str, powers))} between them"
        )


def check_parallel(recipe: Sections) -> None:
    """Checks that several processes can train what a recipe asks for.

    Raises:
        ValueError: they cannot; the message names the setting.
    """
    training, workers, accelerators = recipe.training, recipe.workers, recipe.resources.gpus
    of = f"{workers} {'virtual workers' if recipe.parallel.virtual_workers else 'processes'}"
    if training.micro_batch_size == "auto":
        raise ValueError("training.micro_batch_size: auto looks for it in one process; give a number for several")
    rows = workers * (training.micro_batch_size or 1)
    if training.batch_size % rows:
        raise ValueError(
            f"training.batch_size: {training.batch_size} rows are no multiple of {rows}, a micro-batch in each of "
            f"{of}; take {-(-training.batch_size // rows) * rows}, or change micro_batch_size"
        )
    if accelerators and recipe.processes > accelerators:
        raise ValueError(
            f"training.parallel.processes: {recipe.processes} for {accelerators} accelerator(s); each needs its own"
        )
    together = workers * recipe.micro_batch_size_per_process
    if training.round_size % together:
        raise ValueError(
            f"training.{training.method}.steps_per_generation: a round of {training.round_size} completions is no "
            f"multiple of {together}, a micro-batch in each of {of}; change one of them"
        )
    if recipe.data.order == "blocks":
        raise ValueError("data.order: blocks is for one process; set it to uniform")
    if recipe.parallel.strategy not in training.spec.strategies:
        tried = " or ".join(name for name in training.spec.strategies if not name.startswith("zero"))
        raise ValueError(
            f"training.parallel.strategy: {training.method} was not tried with {recipe.parallel.strategy}; use {tried}"
        )
    if recipe.parallel.virtual_workers:
        _check_virtual(recipe)
    if recipe.parallel.is_zero:
        _check_zero(recipe)
    if recipe.parallel.is_sharded:
        _check_sharded(recipe)
    elif recipe.parallel.offload == "cpu":
        raise ValueError("training.parallel.offload: only shards are held in memory; set strategy: fsdp or zero3")


def _check_virtual(recipe: Sections) -> None:
    training, workers, world = recipe.training, recipe.workers, recipe.world_size
    if workers % world:
        raise ValueError(
            f"training.parallel.virtual_workers: {workers} cannot be dealt evenly to {recipe.max_nodes} nodes "
            f"with {recipe.processes} process(es) each; let resources.nodes times processes divide it"
        )
    refused = {
        "training.parallel.strategy": (
            recipe.parallel.is_sharded,
            f"no process has the whole gradient with {recipe.parallel.strategy}; use ddp",
        ),
        "training.compile": (
            training.compile or training.compile_optimizer,
            "what is compiled follows the rows that a process has seen; leave it out",
        ),
        "hooks.trainer": (
            recipe.hooks.trainer,
            "it may do something else in each process; leave it out",
        ),
        "training.grpo.scale_rewards": (
            training.grpo and training.grpo.scale_rewards == "batch",
            "each worker sees the rewards of its own part of a batch; use group or none",
        ),
        "training.rloo.normalize_advantages": (
            training.rloo and training.rloo.normalize_advantages,
            "each worker sees the rewards of its own part of a batch; leave it out",
        ),
    }
    for what, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{what}: does not go with training.parallel.virtual_workers: {why}")
    if training.generation:
        _check_groups(recipe, training.generation.num_generations)


def _check_groups(recipe: Sections, num_generations: int) -> None:
    """Checks that each virtual worker has all completions of its prompts."""
    workers, rows = recipe.workers, recipe.micro_batch_size_per_process
    if (rows * recipe.steps_per_generation) % num_generations:
        raise ValueError(
            f"training.{recipe.training.method}.num_generations: a virtual worker compares the {num_generations} "
            f"completions of a prompt, and writes {rows * recipe.steps_per_generation} in a round; let a round have a "
            f"multiple of {workers * math.lcm(rows, num_generations)} (training.batch_size, or steps_per_generation "
            f"where it is set), or take fewer of {workers} virtual_workers"
        )


def _check_zero(recipe: Sections) -> None:
    training, strategy = recipe.training, recipe.parallel.strategy
    if training.precision == "fp16":
        raise ValueError(f"training.precision: fp16 was not tried with {strategy}; use bf16")
    if recipe.model.dtype != "float32" and training.precision != "bf16":
        raise ValueError(
            f"model.dtype: {recipe.model.dtype} goes with {strategy} where training.precision is bf16; else use float32"
        )
    if training.compile:
        raise ValueError(
            f"training.compile: does not go with training.parallel.strategy {strategy}: not tried; use fsdp"
        )
    if training.optimizer not in ZERO_OPTIMIZERS:
        raise ValueError(
            f"training.optimizer: {training.optimizer} looks at a weight's form, and {strategy} hands it all weights "
            f"as one row; use one of {', '.join(ZERO_OPTIMIZERS)}"
        )


def _check_sharded(recipe: Sections) -> None:
    training, strategy = recipe.training, recipe.parallel.strategy
    rewards = training.generation.rewards if training.generation else []
    refused = {
        "model.quantization": (recipe.model.quantization, "weights in few bits were not tried in shards; use ddp"),
        "adapter.target_parameters": (
            recipe.adapter and recipe.adapter.target_parameters,
            "PEFT replaces such weights while it computes, and shards are no whole weights; use ddp",
        ),
        "training.trainable": (training.trainable, "shards do not tell what is frozen; use ddp"),
        "training.groups": (training.groups, "a group is clipped by its whole gradient, and shards have none; use ddp"),
        "training.router": (training.router, "the router's losses were not tried in shards; use ddp"),
        "training.compile_optimizer": (training.compile_optimizer, "the two together were not tried; leave one out"),
        f"training.{training.method}.sync_reference": (
            training.sync_reference,
            "no process has the whole model; use ddp",
        ),
        f"training.{training.method}.rewards": (
            any(reward.use == "information_gain" for reward in rewards),
            "information_gain asks the model, which all processes would have to do as often; use ddp",
        ),
        "training.lr_find": (
            training.lr_find,
            "it tries rates in one process, with the whole model on one GPU; give training.learning_rate, or use ddp",
        ),
        "evaluation.write_every": (
            recipe.evaluation.write_every,
            "the process that writes has no whole model; use ddp",
        ),
    }
    for what, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{what}: does not go with training.parallel.strategy {strategy}: {why}")
    if recipe.parallel.offload == "cpu" and not recipe.resources.gpus:
        raise ValueError("training.parallel.offload: without a GPU the shards are in the host's memory already")
