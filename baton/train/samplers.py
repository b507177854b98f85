"""Datasets and orders of rows: functions of seed, epoch and step, distributed to ranks.

No chunk remembers an order. A dataset may have only some of its files here. Each optimizer step has the same rows with
one process as with several.
"""

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from datasets import Dataset
from datasets.table import InMemoryTable, MemoryMappedTable, concat_tables
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from baton.errors import BatonError
from baton.models import train_rows, trained
from baton.models.train_rows import IGNORED
from baton.recipe.recipe import Recipe
from baton.recipe.training import Curriculum
from baton.train.protocol import replaced
from baton.train.tokens import Blocks, ChunkTokens

Row = dict[str, object]


class Sliced(Dataset):
    """Rows of a run by their numbers in the whole; a batch with a row whose file is not on this machine is refused.

    Iteration, by which trainers see the first row's columns, gives some present row in the place of each missing one.
    """

    blocks: Blocks
    present: np.ndarray  # for each file, whether it is here

    def __getitems__(self, keys: list[int]) -> list[Row]:
        files = np.searchsorted(self.blocks.starts, np.asarray(keys), side="right") - 1
        if not self.present[files].all():  # the order of rows is not that of the slice
            row = keys[int(np.argmin(self.present[files]))]
            raise BatonError(f"row {row} of the training data is asked for, and its file was not fetched.")
        return list(super().__getitems__(keys))


def open_files(folder: str, files: list[str], blocks: Blocks, present: set[int]) -> Sliced:
    here = sorted(present)
    table = concat_tables([MemoryMappedTable.from_file(f"{folder}/{files[number]}") for number in here])
    # Missing rows keep 0, the first present one: enough to see the columns, and never part of a batch.
    place = np.zeros(len(blocks), dtype=np.uint64)
    at = 0
    for number in here:
        place[blocks.starts[number] : blocks.starts[number + 1]] = np.arange(at, at + blocks.rows[number])
        at += blocks.rows[number]
    rows = Sliced(
        table, indices_table=InMemoryTable.from_pydict({"indices": pa.array(place)}), fingerprint=f"slice-{here}"
    )
    rows.blocks = blocks
    rows.present = np.isin(np.arange(len(files)), here)
    return rows


def train_dataset(tokens: ChunkTokens) -> Dataset:
    if tokens.blocks is None:
        return trained.open_rows(f"{tokens.folder}/train")
    return train_rows.readable(open_files(tokens.folder, tokens.files, tokens.blocks, tokens.present))


class EpochSampler(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class GroupedByLength(EpochSampler):
    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = list(lengths), batch_size, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        # Upstream draws this from the global state as an epoch begins, which a resumed process has in another place.
        generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class InBlocks(EpochSampler):
    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return self.blocks.order(self.epoch)


class EasyFirst(EpochSampler):
    """Draws each step's rows from the easiest ones; their number grows with the steps."""

    def __init__(
        self, difficulty: Sequence[float], curriculum: Curriculum, *, batch_size: int, num_steps: int, seed: int
    ) -> None:
        self.order = sorted(range(len(difficulty)), key=lambda row: (difficulty[row], row))
        self.curriculum, self.batch_size, self.num_steps, self.seed = curriculum, batch_size, num_steps, seed

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
    """Returns the share of rows, the easiest, that may be drawn once `progress`, a share of the run's steps, is done.

    It goes from `start` to 1 at `until`: linearly, exponentially (its logarithm grows linearly), or in equal jumps.
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
    chosen = rows._indices  # after `select`; there is no public name for it
    return [int(length) for length in (total if chosen is None else total[chosen.column(0).to_numpy()])]


def _mixed(seed: int, number: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63


class Order(Protocol):
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class DistributedBatches(Sampler[list[int]]):
    """The micro-batches of all ranks in turn; Accelerate's shard takes each rank's own.

    Accelerate alone fills up an uneven last step with rows of the first. Here it is split over the ranks, as evenly as
    possible; where `micro` is 1, some passes then have 2 rows. A rank without a row gets one whose labels count for
    nothing; see `is_filler`. `batch_size` is the rows of an optimizer step, `micro` those of a forward pass.
    """

    def __init__(self, sampler: Order, *, batch_size: int, micro: int, world_size: int) -> None:
        self.sampler, self.full, self.micro, self.world_size = sampler, batch_size, micro, world_size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        steps, rest = divmod(len(self.sampler), self.full)
        return (steps * self._rounds(self.full) + self._rounds(rest)) * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in self.sampler:
            rows.append(row)
            if len(rows) == self.full:
                yield from self._pieces(rows)
                rows = []
        yield from self._pieces(rows)

    def is_filler(self, step: int, rank: int) -> bool:
        """Tells whether a rank has no row in a step of the pass, counted from 0."""
        steps, rest = divmod(len(self.sampler), self.full)
        return step == steps and rank >= rest

    def shares(self, step: int, rank: int) -> list[float]:
        """Returns the weight of each of a rank's passes, so that all rows of a step count alike."""
        steps, rest = divmod(len(self.sampler), self.full)
        num_rows = rest if step == steps else self.full
        pieces = list(self._pieces(list(range(num_rows))))[rank :: self.world_size]
        counted = [0 if self.is_filler(step, rank) else len(piece) for piece in pieces]
        # Gradients are then averaged over ranks and passes, which takes both factors away again.
        return [rows * self.world_size * len(pieces) / num_rows for rows in counted]

    def _rounds(self, num_rows: int) -> int:
        """Returns the number of forward passes of each rank in a step."""
        if num_rows < self.world_size:
            return min(num_rows, 1)
        return min(-(-num_rows // (self.micro * self.world_size)), num_rows // self.world_size)

    def _pieces(self, rows: list[int]) -> Iterator[list[int]]:
        if len(rows) < self.world_size:
            yield from ([row] for row in rows)
            yield from ([rows[0]] for _ in range(self.world_size - len(rows) if rows else 0))
            return
        pieces = self._rounds(len(rows)) * self.world_size
        for number in range(pieces):
            yield rows[number * len(rows) // pieces : (number + 1) * len(rows) // pieces]


def distribute_rows(loader: DataLoaderShard, *, batch_size: int, micro: int, world_size: int) -> DistributedBatches:
    shard = loader.batch_sampler
    batches = DistributedBatches(shard.batch_sampler.sampler, batch_size=batch_size, micro=micro, world_size=world_size)
    # Every step has as many pieces for each rank, so that nothing is left for Accelerate to fill up.
    shard.batch_sampler, shard.batch_size, shard.even_batches = batches, None, False
    return batches


def follow_epochs(loader: DataLoaderShard) -> None:
    """Has the epoch reach the sampler of a rank's loader, also where first batches are skipped."""
    # Skipping adds a layer that Trainer and Accelerate do not look through: a rank that resumes in a later epoch would
    # take the order of the first.
    shard = loader.batch_sampler
    inner = shard.batch_sampler
    sampler = inner if hasattr(inner, "set_epoch") else inner.sampler
    if hasattr(sampler, "set_epoch"):
        shard.set_epoch = sampler.set_epoch


def blank(batches: list[dict[str, torch.Tensor]]) -> None:
    for batch in batches:
        batch["labels"].fill_(IGNORED)


def uneven(accelerator: Accelerator) -> contextlib.AbstractContextManager[None]:
    """Has an accelerator gather different numbers of rows from the ranks, as torch does not."""
    gather = accelerator.gather

    def gathered(rows: object) -> object:
        if not isinstance(rows, torch.Tensor) or rows.dim() == 0:
            return gather(rows)
        # Two gathers in all ranks alike: how many rows each has, then the rows, filled up to the most.
        counts = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        filled = torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(counts) - len(rows)))
        pieces = gather(filled).split(max(counts))
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])

    return replaced(accelerator, gather=gathered)
