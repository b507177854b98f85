"""The passes of a step: whose they are, how much each counts, and what each has come to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.components.train_chunk.data.distributed_sampler import DistributedBatches
from baton.components.train_chunk.trainer.base import ChunkTrainer, Window


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of a step as one process that makes them all would count them.

    Attributes:
        own: Numbers of this process's workers.
        rounds: Passes of each worker.
        total: Passes of all workers that have rows.
        fillers: Workers for which no row is left.
        shares: What the mean of each of a worker's passes counts, so that all rows count as much; empty where the loss
            is a sum.
    """

    own: range
    rounds: int
    total: int
    fillers: frozenset[int] = frozenset()
    shares: Mapping[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, own: range, rounds: int, workers: int) -> Passes:
        """Returns those of a step that has rows for all workers."""
        return cls(own=own, rounds=rounds, total=rounds * workers)

    @classmethod
    def of_rows(cls, own: range, rounds: int, pieces: DistributedBatches, step: int, *, sums: bool) -> Passes:
        """Returns those of a step of the pass over the rows, counted from 0; `sums` tells whether the loss is a sum."""
        workers = pieces.world_size
        fillers = frozenset(worker for worker in range(workers) if pieces.is_filler(step, worker))
        total = (workers - len(fillers)) * rounds
        shares = {} if sums else {x: [y * total / (rounds * workers) for y in pieces.shares(step, x)] for x in own}
        return cls(own=own, rounds=rounds, total=total, fillers=fillers, shares=shares)

    def at(self, position: int) -> tuple[int, int]:
        """Returns the worker of this process's pass at a position, and the pass's number among the worker's."""
        return self.own[position // self.rounds], position % self.rounds

    def __len__(self) -> int:
        return len(self.own) * self.rounds


@dataclass(kw_only=True)
class Record:
    """What a pass has come to, besides its gradients.

    Attributes:
        outputs: What it returned.
        flos: Its floating-point operations.
        tokens: Tokens that it counted.
        window: Values that are averaged at the next log.
        weights: What they count in an evaluation, by name; see `ChunkTrainer.figure_weights`.
    """

    outputs: Any
    flos: float = 0.0
    tokens: int = 0
    window: Window = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


def record(trainer: ChunkTrainer, mode: str, compute: Callable[[], Any]) -> Record:
    """Returns what a pass comes to, as if nothing had been logged or counted before it.

    Args:
        trainer: The trainer, whose log and counts stay as they were.
        mode: `train` or `eval`.
        compute: Makes the pass.
    """
    windows, before, counted = trainer.windows, trainer.windows[mode], getattr(trainer, COUNTER, 0)
    windows[mode] = defaultdict(list)
    setattr(trainer, COUNTER, 0)
    try:
        outputs = compute()
        window = {name: list(values) for name, values in windows[mode].items()}
        return Record(outputs=outputs, tokens=getattr(trainer, COUNTER), window=window)
    finally:
        windows[mode] = before
        setattr(trainer, COUNTER, counted)


def add(trainer: ChunkTrainer, mode: str, made: Record) -> None:
    """Adds what a pass has come to to a trainer's log and counts."""
    window = trainer.windows[mode]
    setattr(trainer, COUNTER, getattr(trainer, COUNTER, 0) + made.tokens)
    for name, values in made.window.items():
        if name == "num_tokens":  # a total, not a value of each pass; trainers that write count elsewhere
            window[name] = [getattr(trainer, COUNTER) or values[-1]]
        else:
            window[name].extend(values)


COUNTER = "_total_train_tokens"
"""Attribute of TRL's trainers with the tokens trained on so far."""
