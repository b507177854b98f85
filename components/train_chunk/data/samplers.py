"""Orders of rows that are functions of seed, epoch and step alone, so that no chunk has to remember one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from baton.components.shared.recipe import Curriculum, Recipe
from baton.components.train_chunk.data.sliced_dataset import Sliced
from baton.components.train_chunk.data.slices import Blocks

if TYPE_CHECKING:
    from datasets import Dataset


class GroupedByLength(Sampler[int]):
    """Rows of about the same length together, shuffled anew in each epoch.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows per optimizer step.
        seed: The run's seed.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        # Upstream draws this from the global state as an epoch begins, which a resumed process has in another place.
        generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class InBlocks(Sampler[int]):
    """The rows of a few files together, shuffled anew in each epoch: see `slices`.

    Args:
        blocks: Rows of each file.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return self.blocks.order(self.epoch)


class EasyFirst(Sampler[int]):
    """Each step draws its rows from the easiest ones; how many those are grows with the steps.

    Args:
        difficulty: A number for each row, more being harder.
        curriculum: How the share of rows grows.
        batch_size: Rows per optimizer step.
        num_steps: Optimizer steps of the run.
        seed: The run's seed.
    """

    def __init__(
        self, difficulty: Sequence[float], curriculum: Curriculum, *, batch_size: int, num_steps: int, seed: int
    ) -> None:
        self.order = sorted(range(len(difficulty)), key=lambda row: (difficulty[row], row))
        self.curriculum = curriculum
        self.batch_size = batch_size
        self.num_steps = num_steps
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the steps."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        per_epoch = math.ceil(len(self.order) / self.batch_size)
        for index in range(per_epoch):
            step = self.epoch * per_epoch + index
            size = min(self.batch_size, len(self.order) - index * self.batch_size)
            pool = max(size, math.ceil(share(self.curriculum, step / self.num_steps) * len(self.order)))
            # A generator for each step: nothing has to be known of the steps before.
            drawn = random.Random(_mixed(self.seed, step)).sample(range(pool), size)
            yield from (self.order[position] for position in drawn)


def share(curriculum: Curriculum, progress: float) -> float:
    """Returns the share of rows, the easiest, that may be drawn.

    Args:
        curriculum: Its `ramp` goes from `start` to 1 at `until`: linearly, exponentially (the logarithm of the share
            grows linearly), or in `levels` equal jumps.
        progress: Share of the run's steps that are done.
    """
    done = min(1.0, progress / curriculum.until)
    if done >= 1:
        return 1.0
    if curriculum.ramp == "exponential":
        return float(curriculum.start ** (1 - done))
    if curriculum.ramp == "step":
        done = math.floor(done * curriculum.levels) / curriculum.levels
    return curriculum.start + (1 - curriculum.start) * done


def sampler(recipe: Recipe, rows: Dataset, num_steps: int) -> Sampler[int] | None:
    """Returns the sampler that a recipe asks for, None for the trainer's own."""
    training = recipe.training
    if isinstance(rows, Sliced):
        return InBlocks(rows.blocks)
    if training.group_by_length:
        return GroupedByLength(lengths(rows), training.batch_size, recipe.seed)
    if training.curriculum is None:
        return None
    by = training.curriculum.by
    difficulty = lengths(rows) if by == "length" else [float(value) for value in rows[by]]
    return EasyFirst(
        difficulty, training.curriculum, batch_size=training.batch_size, num_steps=num_steps, seed=recipe.seed
    )


def lengths(rows: Dataset) -> list[int]:
    """Returns the tokens of each row, over all columns that hold a sequence."""
    columns = [rows.data.column(name) for name in rows.column_names if name.endswith("_ids")]
    total = sum(pc.list_value_length(column).to_numpy().astype(np.int64) for column in columns)
    chosen = rows._indices  # what `select` left of the table; there is no public name for it
    return [int(length) for length in (total if chosen is None else total[chosen.column(0).to_numpy()])]


def _mixed(seed: int, number: int) -> int:
    """Returns a seed for one epoch or step."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
