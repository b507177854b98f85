"""One run in several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from components.shared.recipe.base import Section, duration, seconds

if TYPE_CHECKING:
    from components.shared.recipe.recipe import Recipe

MAX_PROCESSES = 64
"""A machine has 16 accelerators at most; on CPUs nobody gains by more than this."""


def _known(value: Any) -> Any:
    """Says of DeepSpeed why it is not there."""
    if isinstance(value, str) and value.startswith("deepspeed"):
        raise ValueError(
            f"is {value!r}; DeepSpeed reads its checkpoints as pickles, which can hold code, so Baton does not read "
            "them from a store. `fsdp` shards weights, gradients and optimizer as ZeRO-3 does, with offload: cpu too"
        )
    return value


class Parallel(Section):
    """One run in several processes of each pod, each with an accelerator of its own; `parallel: fsdp` is short for its
    strategy. Rows of a step, schedule and logged losses are those of one process."""

    strategy: Annotated[Literal["ddp", "fsdp"], BeforeValidator(_known)] = "ddp"
    """`ddp` gives each process the whole model; `fsdp` (FSDP2) shards weights, gradients and optimizer over them."""
    offload: Literal["none", "cpu"] = "none"
    """With `fsdp`: hold the shards in the host's memory while they are not computed with."""
    processes: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = "auto"
    """Processes of a pod; with `auto` one for each of `resources.gpus`, or one."""
    hang_after: Annotated[str, BeforeValidator(duration)] = "10m"
    """Time without a sign of life from all processes after which the stacks of all are logged and the chunk fails."""

    @property
    def hang_seconds(self) -> float:
        """`hang_after` in seconds."""
        return seconds(self.hang_after)

    @property
    def is_sharded(self) -> bool:
        """Whether no process has the whole model."""
        return self.strategy == "fsdp"


def check_parallel(recipe: Recipe) -> None:
    """Checks that several processes can train what a recipe asks for.

    Raises:
        ValueError: they cannot; the message names the setting.
    """
    training, world, accelerators = recipe.training, recipe.world_size, recipe.resources.gpus
    if training.micro_batch_size == "auto":
        raise ValueError("training.micro_batch_size: auto looks for it in one process; give a number for several")
    rows = world * (training.micro_batch_size or 1)
    if training.batch_size % rows:
        raise ValueError(
            f"training.batch_size: {training.batch_size} rows are no multiple of {rows}, a micro-batch in each of "
            f"{world} processes; take {-(-training.batch_size // rows) * rows}, or change micro_batch_size"
        )
    if accelerators and recipe.processes > accelerators:
        raise ValueError(
            f"training.parallel.processes: {recipe.processes} for {accelerators} accelerator(s); each needs its own"
        )
    if training.round_size % (world * recipe.micro):
        raise ValueError(
            f"training.{training.method}.steps_per_generation: a round of {training.round_size} completions is no "
            f"multiple of {world * recipe.micro}, a micro-batch in each of {world} processes; change one of them"
        )
    if recipe.data.order == "blocks":
        raise ValueError("data.order: blocks is for one process; set it to uniform")
    if recipe.parallel.is_sharded:
        _check_sharded(recipe)
    elif recipe.parallel.offload == "cpu":
        raise ValueError("training.parallel.offload: only shards are held in memory; set strategy: fsdp")


def _check_sharded(recipe: Recipe) -> None:
    training = recipe.training
    learns = training.dpo or training.kto or training.generation
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
            learns and learns.sync_reference,
            "no process has the whole model; use ddp",
        ),
        f"training.{training.method}.rewards": (
            any(reward.use == "information_gain" for reward in rewards),
            "information_gain asks the model, which all processes would have to do as often; use ddp",
        ),
        "evaluation.write_every": (
            recipe.evaluation.write_every,
            "the process that writes has no whole model; use ddp",
        ),
    }
    for what, (given, why) in refused.items():
        if given:
            raise ValueError(f"{what}: does not go with training.parallel.strategy fsdp: {why}")
    if recipe.parallel.offload == "cpu" and not recipe.resources.gpus:
        raise ValueError("training.parallel.offload: without a GPU the shards are in the host's memory already")
