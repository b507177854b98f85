"""One run in several processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from baton.components.shared.recipe.base import Section, duration, seconds

MAX_PROCESSES = 64
"""A machine has 16 accelerators at most; on CPUs nobody gains by more than this."""


def _known(value: Any) -> Any:
    """Says by which names DeepSpeed's stages go."""
    if isinstance(value, str) and value.startswith("deepspeed"):
        raise ValueError(f"is {value!r}; DeepSpeed's stages are zero2 and zero3")
    return value


class Parallel(Section):
    """One run in several processes of each pod, each with its own accelerator; `parallel: fsdp` is short for its
    strategy. Rows of a step, schedule and logged losses are those of one process."""

    strategy: Annotated[Literal["ddp", "fsdp", "zero2", "zero3"], BeforeValidator(_known)] = "ddp"
    """`ddp` gives each process the whole model; `fsdp` (FSDP2) shards weights, gradients and optimizer over them, as
    does DeepSpeed's `zero3`; its `zero2` leaves the weights whole. The two need the package deepspeed."""
    offload: Literal["none", "cpu"] = "none"
    """With all but `ddp`: hold what is split in the host's memory while it is not computed with."""
    processes: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = "auto"
    """Processes of a pod; with `auto` one for each of `resources.gpus`, or one."""
    virtual_workers: Annotated[int, Field(ge=2, le=MAX_PROCESSES)] | None = None
    """Cut each step for so many workers, a power of two, whatever the number of processes that share them: those may be
    as many, fewer or one, and change between chunks, and the bits are the same. With `ddp` alone."""
    hang_after: Annotated[str, BeforeValidator(duration)] = "10m"
    """Time without a sign of life from all processes after which the stacks of all are logged and the chunk fails."""

    @field_validator("virtual_workers")
    @classmethod
    def _halves(cls, value: int | None) -> int | None:
        """Refuses a number that cannot be halved down to one, as the tree of sums is."""
        if value is not None and value & (value - 1):
            raise ValueError(f"is {value}; expected a power of two, such as {2 ** (value.bit_length() - 1)}")
        return value

    @property
    def hang_seconds(self) -> float:
        """`hang_after` in seconds."""
        return seconds(self.hang_after)

    @property
    def is_sharded(self) -> bool:
        """Whether no process has the whole state."""
        return self.strategy != "ddp"

    @property
    def splits_weights(self) -> bool:
        """Whether no process has the whole model."""
        return self.strategy in ("fsdp", "zero3")

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed splits the state."""
        return self.strategy in ("zero2", "zero3")

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's number of what is split: 2 optimizer and gradients, 3 weights too, 0 where it is not there."""
        return int(self.strategy[-1]) if self.is_zero else 0
