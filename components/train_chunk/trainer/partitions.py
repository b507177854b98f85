"""ZeRO's partitions: which values of which weight each process has, and what was saved cut for another number of them.

DeepSpeed lays values of weights in flat rows, and each process has a part of each row. In stage 2 a row is a group of
weights one after the other, which is cut evenly. In stage 3 each weight is cut evenly by itself, and a process's row
has its parts of all weights of a group. What does not come out even is filled up with zeros.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.components.shared.checkpoints import zero
from baton.components.shared.core.errors import DamagedError
from baton.components.train_chunk.trainer.base import StateDict

ALIGNMENT = 2
"""Stage 2 cuts a row into parts of a multiple of so many values."""
MASTERS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
"""Stage → where the weights' masters are in its state."""
OPTIMIZER = {2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""Stage → where the optimizer's own state is."""
MASTER = "master"
"""The kind of values that is no entry of the optimizer's own state."""


@dataclass(frozen=True)
class Piece:
    """Values of one weight in a process's row.

    Attributes:
        weight: The weight's number, in the optimizer's order.
        start: First of its values.
        stop: The one after the last.
        padding: Zeros after them.
    """

    weight: int
    start: int
    stop: int
    padding: int = 0

    @property
    def length(self) -> int:
        """How many values it takes in the row."""
        return self.stop - self.start + self.padding


@dataclass(frozen=True)
class Place:
    """Where some values of a weight lie: in which process's row, and from which of its values on."""

    rank: int
    row: int
    offset: int
    piece: Piece


class Cut:
    """Which values each of some processes has.

    Args:
        stage: DeepSpeed's stage.
        groups: Sizes of the weights, by row.
        ranks: Number of processes.

    Attributes:
        rows: Process → row → its pieces, in order.
    """

    def __init__(self, stage: int, groups: Sequence[Sequence[int]], ranks: int) -> None:
        self.rows: list[list[list[Piece]]] = [[] for _ in range(ranks)]
        self._places: dict[int, list[Place]] = {}
        first = 0
        for row, group in enumerate(groups):
            for rank, pieces in enumerate((_even_row if stage == 2 else _even_weights)(group, first, ranks)):
                self.rows[rank].append(pieces)
                offset = 0
                for piece in pieces:
                    self._places.setdefault(piece.weight, []).append(Place(rank, row, offset, piece))
                    offset += piece.length
            first += len(group)

    def all_places(self, weight: int) -> list[Place]:
        """Returns where a weight lies, process by process."""
        return self._places[weight]

    def places(self, weight: int, start: int, stop: int) -> Iterator[tuple[Place, int, int]]:
        """Yields where some values of a weight lie, each place with the first and last of those that it has."""
        for place in self._places[weight]:
            begin, end = max(place.piece.start, start), min(place.piece.stop, stop)
            if begin < end:
                yield place, begin, end


def sizes(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Returns how many values each weight of some groups has, also where a process has only some of them."""
    return [[getattr(weight, "ds_numel", weight.numel()) for weight in group] for group in groups]


def length(pieces: Sequence[Piece]) -> int:
    """Returns how many values a process's row has, zeros at its end among them."""
    return sum(piece.length for piece in pieces)


def _even_row(group: Sequence[int], first: int, ranks: int) -> Iterator[list[Piece]]:
    """Yields each process's part of a row that has its weights one after the other."""
    share = -(-sum(group) // (ALIGNMENT * ranks)) * ALIGNMENT
    for rank in range(ranks):
        pieces, at = [], 0
        for weight, size in enumerate(group, first):
            start, stop = (min(max(edge * share - at, 0), size) for edge in (rank, rank + 1))
            if start < stop:
                pieces.append(Piece(weight, start, stop))
            at += size
        missing = share - length(pieces)
        yield [*pieces, Piece(first + len(group) - 1, group[-1], group[-1], missing)] if missing else pieces


def _even_weights(group: Sequence[int], first: int, ranks: int) -> Iterator[list[Piece]]:
    """Yields each process's parts of weights that are cut each by itself."""
    for rank in range(ranks):
        pieces = []
        for weight, size in enumerate(group, first):
            share = -(-size // ranks)
            start, stop = (min(edge * share, size) for edge in (rank, rank + 1))
            pieces.append(Piece(weight, start, stop, share - (stop - start)))
        yield pieces


class Saved:
    """What the processes of a checkpoint have written, each its own part.

    Args:
        checkpoint: Local files of the checkpoint.
        ranks: How many processes wrote it.
        groups: Sizes of the weights that are trained, by group of the optimizer.

    Attributes:
        parts: Their states; rows are slices of files, which read what is asked of them.
        stage: DeepSpeed's stage.
        cut: Which values each has.

    Raises:
        DamagedError: they are not what was written, or not cut as DeepSpeed cuts.
    """

    def __init__(self, checkpoint: str, ranks: int, groups: Sequence[Sequence[int]]) -> None:
        self.parts = [zero.read(os.path.join(checkpoint, zero.file_name(rank)), lazily=True) for rank in range(ranks)]
        self.stage = next((stage for stage in MASTERS if MASTERS[stage] in self.parts[0]), 0)
        if not self.stage:
            raise DamagedError(f"{zero.file_name(0)} holds no state of ZeRO.")
        if self.stage == 3:
            # Rows of stage 3 depend on the number of processes where they are long.
            groups = _regrouped(
                [size for group in groups for size in group],
                [row.get_shape()[0] for row in self.parts[0][MASTERS[3]]],
                ranks,
            )
        self.cut = Cut(self.stage, groups, ranks)
        for rank, part in enumerate(self.parts):
            for row, pieces in zip(part[MASTERS[self.stage]], self.cut.rows[rank], strict=True):
                # Stage 2 saves its masters without the zeros at their end.
                real = length(pieces) - (pieces[-1].padding if self.stage == 2 else 0)
                if row.get_shape() != [real] or any(map(any, part.get("param_alignment_paddings", []))):
                    raise DamagedError(f"{zero.file_name(rank)} is not cut as by DeepSpeed {zero.VERSION}.")

    @property
    def settings(self) -> list[StateDict]:
        """The optimizer's groups, without their weights."""
        groups = self.optimizer(0)["param_groups"]
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def optimizer(self, rank: int) -> StateDict:
        """Returns a process's part of the optimizer's own state."""
        state: StateDict = self.parts[rank][OPTIMIZER[self.stage]]
        return state

    def part(self, own: StateDict, cut: Cut, rank: int) -> StateDict:
        """Returns the state of a process among another number of them.

        Args:
            own: Its state as DeepSpeed has made it, before anything is restored.
            cut: Which values each of those processes has.
            rank: Its number.
        """
        mine = own[OPTIMIZER[self.stage]]["param_groups"]
        rows = cut.rows[rank]
        optimizer = {
            "state": {row: self.state(pieces) for row, pieces in enumerate(rows)},
            "param_groups": [
                {**saved, "params": now["params"]} for saved, now in zip(self.settings, mine, strict=True)
            ],
        }
        masters = [self.row(MASTER, pieces) for pieces in rows]
        return {**own, OPTIMIZER[self.stage]: optimizer, MASTERS[self.stage]: masters}

    def is_row(self, rank: int, row: int, kind: str) -> bool:
        """Tells whether an entry of the optimizer's own state has a value for each one of a row."""
        value = self.optimizer(rank)["state"][row][kind]
        return hasattr(value, "get_shape") and value.get_shape() == [length(self.cut.rows[rank][row])]

    def row(self, kind: str, pieces: Sequence[Piece]) -> torch.Tensor:
        """Returns a row that is cut in another way."""
        parts = []
        for piece in pieces:
            for place, begin, end in self.cut.places(piece.weight, piece.start, piece.stop):
                at = place.offset + begin - place.piece.start
                parts.append(self._held(kind, place)[at : at + end - begin])
            parts.append(torch.zeros(piece.padding, dtype=parts[-1].dtype if parts else torch.float32))
        return torch.cat(parts)

    def state(self, pieces: Sequence[Piece]) -> StateDict:
        """Returns the optimizer's own state of a row that is cut in another way; nothing of it is another row's too."""
        place, _, _ = next(self.cut.places(pieces[0].weight, 0, pieces[0].stop or 1))
        entries = self.optimizer(place.rank)["state"].get(place.row, {})
        return {
            # A copy: optimizers count their steps in place, and one count for several weights would run ahead.
            kind: self.row(kind, pieces) if self.is_row(place.rank, place.row, kind) else copy.deepcopy(value)
            for kind, value in entries.items()
        }

    def _held(self, kind: str, place: Place) -> Any:
        if kind == MASTER:
            return self.parts[place.rank][MASTERS[self.stage]][place.row]
        return self.optimizer(place.rank)["state"][place.row][kind]


def _regrouped(left: list[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns sizes of weights by row, given how long the rows of a process are."""
    groups: list[list[int]] = []
    for wanted in lengths:
        groups.append([])
        while left and sum(-(-size // ranks) for size in groups[-1]) < wanted:
            groups[-1].append(left.pop(0))
    if left:
        raise DamagedError(f"{zero.file_name(0)} has fewer values than the model.")
    return groups
