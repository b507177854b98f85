"""Draws of rows and batches that follow from seed and epoch alone, in the place of those that upstream leaves open."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import datasets
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, SequentialSampler
from transformers import TrainerCallback, TrainerState
from trl.trainer.utils import RepeatSampler

from baton.components.shared.core.errors import ExactnessError
from baton.components.shared.models.own_code import hooks

FIXED = (SequentialSampler, RepeatSampler)
"""Samplers that draw nothing, and TRL's, which `Completing` seeks."""


class Replayed(Sampler[int]):
    """A sampler whose order in an epoch depends on seed and epoch alone.

    It draws with all generators seeded. One that has a generator of its own is brought to where an uninterrupted
    process has it: the orders of the epochs before are drawn and dropped.

    Args:
        sampler: Whose orders they are, fresh.
        seed: The run's seed.
    """

    def __init__(self, sampler: Sampler[int], seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self.epoch = self._drawn = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        order: list[int] = []
        while self._drawn <= self.epoch:
            with hooks.seeded(_number(self.seed, "order", self._drawn)):
                order = list(self.sampler)
            self._drawn += 1
        return iter(order)


def exact(sampler: Sampler[int] | None, seed: int, *, seedable: bool) -> Sampler[int] | None:
    """Returns a sampler whose order does not depend on what this process has drawn before; the same one if it is such.

    Args:
        sampler: As the trainer makes it, None for rows without a length.
        seed: The run's seed.
        seedable: Whether Accelerate takes its own sampler for torch's random one, which is a function of the epoch.
    """
    if sampler is None or isinstance(sampler, FIXED) or hasattr(sampler, "set_epoch"):
        return sampler
    if type(sampler) is RandomSampler and seedable and sampler.generator is None:
        return sampler
    if isinstance(sampler, BatchSampler):
        raise ExactnessError(f"{type(sampler).__name__} has no set_epoch: its order cannot be resumed.")
    return Replayed(sampler, seed)


class SeededRows(Dataset[Any]):
    """Rows of a dataset that may draw random numbers, each drawn from seed, epoch and index.

    Args:
        rows: The dataset.
        seed: The run's seed.
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed, self.epoch = rows, seed, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        with hooks.seeded(_number(self.seed, "row", self.epoch, index)):
            return self.rows[index]


class SeededTransform:
    """A transform of rows that may draw random numbers, drawn from seed, epoch and the rows' content.

    Args:
        transform: It.
        seed: The run's seed.
    """

    def __init__(self, transform: Callable[[Any], Any], seed: int) -> None:
        self.transform, self.seed, self.epoch = transform, seed, 0

    def __call__(self, rows: Any) -> Any:
        """Returns the transformed rows."""
        with hooks.seeded(_number(self.seed, "rows", self.epoch, rows)):
            return self.transform(rows)


Seeded = SeededRows | SeededTransform
"""What draws for rows, and must be told the epoch."""


def seeded_rows(rows: Any, seed: int) -> tuple[Any, Seeded | None]:
    """Returns rows whose draws follow from seed and epoch, and what must be told the epoch; None for rows without."""
    if isinstance(rows, datasets.Dataset):
        if rows.format["type"] != "custom":
            return rows, None
        transform = SeededTransform(rows.format["format_kwargs"]["transform"], seed)
        return rows.with_transform(transform, columns=rows.format["columns"]), transform
    wrapped = SeededRows(rows, seed)
    return wrapped, wrapped


class OnePass(TrainerCallback):
    """Ends training where a stream is begun once more: its place cannot be told from the number of steps any more."""

    stateless = True

    def __init__(self) -> None:
        self._passes = 0

    def on_epoch_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Counts the pass.

        Raises:
            ExactnessError: it is the second one.
        """
        self._passes += 1
        if self._passes > 1:
            raise ExactnessError(
                f"the stream of rows has come to its end at step {state.global_step} of {state.max_steps}, and a "
                "second pass over it cannot be resumed exactly.",
                remedy="Let the stream itself go on: train_dataset.repeat(n), or a lower max_steps.",
            )


def _number(*parts: object) -> int:
    """Returns a seed from what a draw depends on."""
    text = ":".join(map(repr, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
