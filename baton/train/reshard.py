"""Restores state saved by another number of ranks, and proves by digests that all of it is there.

A manifest has the digest of each saving rank's part. Ranks assemble each tensor, one at a time, cut it as those ranks
had it, and hash it. Nothing more is saved for this, so checkpoints of earlier versions can be compared too.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from baton.checkpoint import sharded
from baton.checkpoint.digest import TensorHash, tree_digest
from baton.errors import UserError
from baton.train import sharding, state
from baton.train.protocol import ChunkTrainer, StateDict
from baton.train.sharding import MASTER, SavedPartitions, WeightSegment, weight_sizes

if TYPE_CHECKING:
    from torch import nn


class LoadFromShards(ChunkTrainer):
    """Mixin where one process trains alone: puts together what a checkpoint of several has in parts."""

    def read_weights(self, checkpoint: str, model: nn.Module | None = None) -> None:
        """Restores weights, from shards where the checkpoint has such."""
        if not sharded.is_sharded(checkpoint):
            super().read_weights(checkpoint, model)
            return
        types = {entry.properties.dtype for entry in sharded.tensors(checkpoint).values()}
        for weight in self.model.parameters():
            if weight.requires_grad:
                _require_type(weight, types)
        scratch = os.path.join(self.args.output_dir, "joined")
        try:
            super().read_weights(sharded.as_whole(checkpoint, scratch), model)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def read_optimizer(self, checkpoint: str) -> None:
        """Restores optimizer and schedule, from FSDP's shards or ZeRO's partitions."""
        schedule = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
        if sharded.is_sharded(checkpoint):
            self._load_shards(os.path.join(checkpoint, sharded.OPTIMIZER))
        else:
            self._load_partitions(checkpoint)
            schedule = with_all(schedule, self.optimizer.param_groups)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_shards(self, folder: str) -> None:
        """Restores the optimizer from FSDP's shards, as Accelerate does in several processes."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        optimizer = self.bare_optimizer()
        state = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        sharded.fill(folder, state)
        set_optimizer_state_dict(self.model, optimizer, state["optimizer"])

    def _load_partitions(self, checkpoint: str) -> None:
        """Restores weights, from their masters, and optimizer from ZeRO's partitions."""
        groups = self.trained()
        saved = SavedPartitions(checkpoint, self.resumption.ranks, weight_sizes(groups))
        state = {}
        for number, weight in enumerate(itertools.chain.from_iterable(groups)):
            pieces = [WeightSegment(number, 0, weight.numel())]
            master = saved.row(MASTER, pieces)
            _require_type(weight, {master.dtype})
            weight.data.copy_(master.view_as(weight))
            state[number] = {
                kind: value.view_as(weight) if isinstance(value, torch.Tensor) and value.dim() == 1 else value
                for kind, value in saved.state(pieces).items()
            }
        settings = iter(saved.settings)  # DeepSpeed has left out groups without weights
        own = self.optimizer.state_dict()["param_groups"]
        merged = [{**next(settings), "params": group["params"]} if group["params"] else group for group in own]
        self.optimizer.load_state_dict({"state": state, "param_groups": merged})


def with_weights(schedule: StateDict, groups: Sequence[StateDict]) -> StateDict:
    """Returns a schedule's state without the groups that have no weights, which DeepSpeed leaves out."""
    return {
        name: [each for each, group in zip(value, groups, strict=True) if group["params"]]
        if isinstance(value, list) and len(value) == len(groups)
        else value
        for name, value in schedule.items()
    }


def with_all(schedule: StateDict, groups: Sequence[StateDict]) -> StateDict:
    """Returns a schedule's state with such groups among the others; they get what the first one has."""
    held = [group for group in groups if group["params"]]
    full = {}
    for name, value in schedule.items():
        if isinstance(value, list) and len(value) == len(held):
            left = iter(value)
            full[name] = [next(left) if group["params"] else value[0] for group in groups]
        else:
            full[name] = value
    return full


def _require_type(weight: torch.Tensor, types: Set[torch.dtype]) -> None:
    """Raises `UserError` where a weight is held in no type that weights were saved in: it would be rounded."""
    if weight.dtype not in types:
        held, *saved = (str(each).removeprefix("torch.") for each in (weight.dtype, *types))
        raise UserError(
            f"the checkpoint's weights are in {' and '.join(sorted(saved))}, and one process would hold them in "
            f"{held}, as model.dtype says.",
            remedy="Train on in several processes, or fork the run's exported model.",
        )


Hash = Callable[[torch.Tensor], list[TensorHash]]
"""Hashes what each rank had of a tensor."""


def digests_as_saved(trainer: ChunkTrainer) -> dict[str, str]:
    """Returns the digests of the parts that the ranks of the checkpoint had split, as they are in memory now.

    All ranks must call it: it gathers.
    """
    resumption = trainer.resumption
    strategy = resumption.strategy if resumption.ranks > 1 else trainer.recipe.parallel.strategy
    trees: dict[str, list[Any]] = {}
    if strategy == "fsdp":
        ranks = resumption.ranks
        trees["weights"] = _trees(state.trained_weights(trainer.model), ranks, _shards(trainer, _is_weight))
        trees["optimizer"] = _trees(trainer.optimizer_state(), ranks, _shards(trainer, torch.Tensor.dim))
    elif strategy != "ddp":
        trees["weights"] = _zero_weights(trainer, strategy)
        if "optimizer" not in resumption.left_out:
            trees["optimizer"] = _Partitions(trainer).trees()
        if trainer.args.world_size == 1:
            trees["scheduler"] = [with_weights(trainer.lr_scheduler.state_dict(), trainer.optimizer.param_groups)]
    return {part: state.combine_ranks([tree_digest(tree) for tree in of_ranks]) for part, of_ranks in trees.items()}


def _trees(value: Any, ranks: int, hashed: Hash) -> list[Any]:
    """Returns nested containers as each rank had them, hashes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return list(hashed(value))
    if isinstance(value, Mapping):
        columns = {key: _trees(item, ranks, hashed) for key, item in value.items()}
        return [{key: column[rank] for key, column in columns.items()} for rank in range(ranks)]
    if isinstance(value, list | tuple):
        items = [_trees(item, ranks, hashed) for item in value]
        return [[column[rank] for column in items] for rank in range(ranks)]
    return [value] * ranks


def _is_weight(tensor: torch.Tensor) -> bool:
    """Tells weights from a model's buffers, of which each rank has all."""
    return isinstance(tensor, torch.nn.Parameter)


def _shards(trainer: ChunkTrainer, is_split: Callable[[torch.Tensor], object]) -> Hash:
    """Returns how FSDP cuts a tensor, by its first dimension; `is_split` tells whether, of one that is whole here."""
    from torch.distributed.tensor import DTensor

    ranks = trainer.resumption.ranks

    def hashed(tensor: torch.Tensor) -> list[TensorHash]:
        if isinstance(tensor, DTensor):
            splits = any(placement.is_shard() for placement in tensor.placements)
            tensor = tensor.full_tensor()
        else:
            splits = not trainer.is_fsdp_enabled and bool(is_split(tensor))
        if not splits:
            return [_hash(tensor)] * ranks
        chunks = tensor.detach().chunk(ranks)
        return [_hash(chunk) for chunk in (*chunks, *[tensor[:0]] * (ranks - len(chunks)))]

    return hashed


def _hash(tensor: torch.Tensor) -> TensorHash:
    whole = TensorHash(tensor.dtype, tuple(tensor.shape))
    whole.update(tensor)
    return whole


def _zero_weights(trainer: ChunkTrainer, strategy: str) -> list[Any]:
    """Returns the weights as each rank had them: all of them in stage 2, an even part of each in stage 3."""
    ranks = trainer.resumption.ranks
    # In bf16 DeepSpeed holds the model in it, beside its masters; one process has the masters alone.
    casts = trainer.args.world_size == 1 and trainer.recipe.training.precision == "bf16"

    def hashed(tensor: torch.Tensor) -> list[TensorHash]:
        size, is_weight = getattr(tensor, "ds_numel", tensor.numel()), _is_weight(tensor)
        if hasattr(tensor, "ds_tensor"):
            own = tensor.ds_tensor
            parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]  # all of one size
            torch.distributed.all_gather(parts, own.detach().contiguous())
            tensor = torch.cat(parts)[:size]
        if casts and is_weight:
            tensor = tensor.to(torch.bfloat16)
        if strategy == "zero2" or not is_weight:
            return [_hash(tensor)] * ranks
        share = -(-size // ranks)
        row = torch.cat([tensor.detach().flatten(), tensor.new_zeros(share * ranks - size)])
        return [_hash(part) for part in row.split(share)]

    return _trees(state.trained_weights(trainer.model), ranks, hashed)


class _Partitions:
    """The state of ZeRO's optimizer in memory, as the ranks of the checkpoint had it."""

    def __init__(self, trainer: ChunkTrainer) -> None:
        groups, ranks = trainer.trained(), trainer.args.world_size
        sizes = sharding.weight_sizes(groups)
        self._trainer = trainer
        self._weights = list(itertools.chain.from_iterable(groups))
        self._sizes = list(itertools.chain.from_iterable(sizes))
        self._saved = sharding.SavedPartitions(trainer.resumption.folder or "", trainer.resumption.ranks, sizes)
        self._cut = sharding.Partitioning(self._saved.stage, sizes, ranks) if ranks > 1 else None  # None: all is whole
        self._own = trainer.optimizer_state()

    def trees(self) -> list[StateDict]:
        """Returns the state of each rank, hashes in place of tensors."""
        saved, stage = self._saved, self._saved.stage
        masters, optimizer = sharding.MASTERS[stage], sharding.OPTIMIZER_STATES[stage]
        own = self._own[optimizer] if self._cut else self._own
        groups = [group for group in own["param_groups"] if group["params"]]
        # What is beside these in the file tells how it was cut, and is no state.
        trees: list[StateDict] = [
            {
                **part,
                masters: [],
                optimizer: {
                    "state": {row: {} for row in part[optimizer]["state"]},
                    "param_groups": [
                        {**now, "params": then["params"]}
                        for now, then in zip(groups, part[optimizer]["param_groups"], strict=True)
                    ],
                },
            }
            for part in saved.parts
        ]
        for row in range(len(saved.cut.rows[0])):
            for tree, hashed in zip(trees, self._rows(sharding.MASTER, row), strict=True):
                tree[masters].append(hashed)
            for kind in saved.optimizer(0)["state"].get(row, {}):
                values = self._rows(kind, row) if saved.is_row(0, row, kind) else self._entries(kind, row)
                for tree, value in zip(trees, values, strict=True):
                    tree[optimizer]["state"][row][kind] = value
        return trees

    def _rows(self, kind: str, row: int) -> list[Any]:
        """Returns the hashes of a row's parts, rank by rank."""
        cut, stage = self._saved.cut, self._saved.stage
        is_lean = stage == 2 and kind == sharding.MASTER  # without the zeros at its end
        hashes: list[TensorHash] = []
        for number in self._numbers(row):
            whole = self._whole(kind, number)
            for rows in [] if hashes else cut.rows:
                size = sharding.row_length(rows[row]) - (rows[row][-1].padding if is_lean else 0)
                hashes.append(TensorHash(whole.dtype, (size,)))
            for place in cut.all_places(number):
                piece = place.piece
                hashes[place.rank].update(whole[piece.start : piece.stop])
                hashes[place.rank].update(whole.new_zeros(0 if is_lean else piece.padding))
        return hashes

    def _entries(self, kind: str, row: int) -> list[Any]:
        """Returns a value that each rank had one of for a row; all that differ, where weights have different ones."""
        values = {tree_digest(value): value for value in (self._held(kind, number) for number in self._numbers(row))}
        value = next(iter(values.values())) if len(values) == 1 else list(values.values())
        return [value] * len(self._saved.parts)

    def _numbers(self, row: int) -> list[int]:
        """Returns the weights of a row, in order."""
        return sorted({piece.weight for rows in self._saved.cut.rows for piece in rows[row]})

    def _held(self, kind: str, number: int) -> Any:
        """Returns what this rank has for a weight: its values, or those of the row that it is in."""
        if self._cut is None:
            weight = self._weights[number]
            return weight if kind == sharding.MASTER else self._trainer.optimizer.state[weight][kind]
        stage = self._saved.stage
        row = self._cut.all_places(number)[0].row
        if kind == sharding.MASTER:
            return self._own[sharding.MASTERS[stage]][row]
        return self._own[sharding.OPTIMIZER_STATES[stage]]["state"][row][kind]

    def _whole(self, kind: str, number: int) -> torch.Tensor:
        """Returns all values of a weight in one row; each rank sends what it has of them."""
        held: torch.Tensor = self._held(kind, number).detach()
        if self._cut is None:
            return held.flatten()
        whole = held.new_empty(self._sizes[number])
        for place in self._cut.all_places(number):
            piece = place.piece
            if piece.start < piece.stop:
                values = whole[piece.start : piece.stop]
                if place.rank == self._trainer.args.process_index:
                    values.copy_(held[place.offset : place.offset + len(values)])
                torch.distributed.broadcast(values, place.rank)
        return whole
