"""Restores state saved by another number of ranks, and proves by digests that it is complete.

A manifest has the digest of each saving rank's part. Ranks assemble the tensors one at a time, cut each as the saving
ranks had it, and hash the pieces. Nothing else is saved for this: it also works for checkpoints of earlier versions.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed
from torch import nn

from baton.checkpoint import sharded
from baton.checkpoint.digest import TensorHash, tree_digest
from baton.errors import UserError
from baton.train import sharding, state
from baton.train.protocol import ChunkTrainer, StateDict


class LoadFromShards(ChunkTrainer):
    """Mixin for a process that trains alone: joins the parts of a checkpoint of several."""

    def read_weights(self, checkpoint: str, model: nn.Module | None = None) -> None:
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
        schedule = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
        if sharded.is_sharded(checkpoint):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

            # As Accelerate does it in several processes.
            optimizer = self.bare_optimizer()
            state = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
            sharded.fill(os.path.join(checkpoint, sharded.OPTIMIZER), state)
            set_optimizer_state_dict(self.model, optimizer, state["optimizer"])
        else:
            self._load_partitions(checkpoint)
            schedule = with_all(schedule, self.optimizer.param_groups)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_partitions(self, checkpoint: str) -> None:
        """Restores optimizer, and weights from their masters."""
        groups = self.trained()
        saved = sharding.SavedPartitions(checkpoint, self.resumption.ranks, sharding.weight_sizes(groups))
        state = {}
        for number, weight in enumerate(itertools.chain.from_iterable(groups)):
            pieces = [sharding.WeightSegment(number, 0, weight.numel())]
            master = saved.row(sharding.MASTER, pieces)
            _require_type(weight, {master.dtype})
            weight.data.copy_(master.view_as(weight))
            state[number] = {
                kind: value.view_as(weight) if isinstance(value, torch.Tensor) and value.dim() == 1 else value
                for kind, value in saved.state(pieces).items()
            }
        settings = iter(saved.settings)  # DeepSpeed omits groups without weights
        own = self.optimizer.state_dict()["param_groups"]
        merged = [{**next(settings), "params": group["params"]} if group["params"] else group for group in own]
        self.optimizer.load_state_dict({"state": state, "param_groups": merged})


def with_weights(schedule: StateDict, groups: Sequence[StateDict]) -> StateDict:
    """Returns a schedule's state without groups that have no weights, which DeepSpeed omits."""
    return {
        name: [each for each, group in zip(value, groups, strict=True) if group["params"]]
        if isinstance(value, list) and len(value) == len(groups)
        else value
        for name, value in schedule.items()
    }


def with_all(schedule: StateDict, groups: Sequence[StateDict]) -> StateDict:
    """Returns a schedule's state with those groups again; they get the first one's values."""
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
    """Raises `UserError` if a weight's dtype is none of the saved ones, as it would be rounded."""
    if weight.dtype not in types:
        held, *saved = (str(each).removeprefix("torch.") for each in (weight.dtype, *types))
        raise UserError(
            f"the checkpoint's weights are in {' and '.join(sorted(saved))}, and one process would hold them in "
            f"{held}, the model.dtype.",
            remedy="Train on in several processes, or fork the run's exported model.",
        )


Hash = Callable[[torch.Tensor], list[TensorHash]]  # hashes each saving rank's part of a tensor


def digests_as_saved(trainer: ChunkTrainer) -> dict[str, str]:
    """Returns the digests of the parts that the saving ranks had split, from memory; all ranks must call it."""
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
    """Returns nested containers as each saving rank had them, with hashes in place of tensors."""
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
    """Tells a weight from a buffer, which each rank has whole."""
    return isinstance(tensor, torch.nn.Parameter)


def _shards(trainer: ChunkTrainer, is_split: Callable[[torch.Tensor], object]) -> Hash:
    """Hashes a tensor as FSDP cuts it, by its first dimension; `is_split` decides for one that is whole here."""
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
    """Returns the weights as each saving rank had them: whole in stage 2, an even part of each in stage 3."""
    ranks = trainer.resumption.ranks
    # In bf16 DeepSpeed has a model in bf16 in addition to its masters; a single process has only the masters.
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
    """The state of ZeRO's optimizer in memory, as the saving ranks had it."""

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
        """Returns each saving rank's state, with hashes in place of tensors."""
        saved, stage = self._saved, self._saved.stage
        masters, optimizer = sharding.MASTERS[stage], sharding.OPTIMIZER_STATES[stage]
        own = self._own[optimizer] if self._cut else self._own
        groups = [group for group in own["param_groups"] if group["params"]]
        # The file's other entries describe how it was cut, and are taken as they are.
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
        """Returns the hash of each saving rank's part of a row."""
        cut, stage = self._saved.cut, self._saved.stage
        is_lean = stage == 2 and kind == sharding.MASTER  # without padding
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
        """Returns each rank's single value for a row, or all of them if its weights have different ones."""
        values = {tree_digest(value): value for value in (self._held(kind, number) for number in self._numbers(row))}
        value = next(iter(values.values())) if len(values) == 1 else list(values.values())
        return [value] * len(self._saved.parts)

    def _numbers(self, row: int) -> list[int]:
        return sorted({piece.weight for rows in self._saved.cut.rows for piece in rows[row]})

    def _held(self, kind: str, number: int) -> Any:
        """Returns this rank's values for a weight, or for the row that contains it."""
        if self._cut is None:
            weight = self._weights[number]
            return weight if kind == sharding.MASTER else self._trainer.optimizer.state[weight][kind]
        stage = self._saved.stage
        row = self._cut.all_places(number)[0].row
        if kind == sharding.MASTER:
            return self._own[sharding.MASTERS[stage]][row]
        return self._own[sharding.OPTIMIZER_STATES[stage]]["state"][row][kind]

    def _whole(self, kind: str, number: int) -> torch.Tensor:
        """Returns all values of a weight, flat; all ranks must call it in the same order, as it broadcasts."""
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
