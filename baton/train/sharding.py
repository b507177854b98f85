"""ZeRO and FSDP2 through Accelerate: partitions, settings, and checkpoints for any number of processes.

DeepSpeed keeps values of weights in flat rows, and each process has a part of each row. In stage 2 a row is a group of
weights one after the other, cut evenly. In stage 3 each weight is cut evenly by itself, and a process's row has its
parts of all weights of a group. Zeros fill up uneven parts.

A ZeRO checkpoint has whole weights and each process's optimizer part, without pickles (`baton.checkpoint.zero_format`).
Under ZeRO the engine trains; optimizer, schedule and clipping are the recipe's. FSDP2 also runs on CPUs.
"""

import copy
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from baton.checkpoint import sharded, zero_format
from baton.errors import DamagedError
from baton.models import trainable
from baton.recipe.recipe import Recipe
from baton.recipe.training import Training
from baton.train.distributed import Ranks
from baton.train.protocol import ChunkTrainer, Options, StateDict

ALIGNMENT = 2  # stage 2 cuts a row into parts of a multiple of so many values
# By stage, the keys of the weights' masters and of the optimizer's own state.
MASTERS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
OPTIMIZER_STATES = {2: "base_optimizer_state", 3: "optimizer_state_dict"}
MASTER = "master"  # the kind of values that is no entry of the optimizer's own state


@dataclass(frozen=True)
class WeightSegment:
    """Values of one weight in a process's row, with zeros after them; weights count in the optimizer's order."""

    weight: int
    start: int
    stop: int
    padding: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start + self.padding


@dataclass(frozen=True)
class SegmentPlace:
    """A segment's place: a process's row, and the offset there."""

    rank: int
    row: int
    offset: int
    piece: WeightSegment


class Partitioning:
    """Partition of values among processes, given the sizes of the weights by row."""

    def __init__(self, stage: int, groups: Sequence[Sequence[int]], ranks: int) -> None:
        self.rows: list[list[list[WeightSegment]]] = [[] for _ in range(ranks)]  # process → row → its pieces, in order
        self._places: dict[int, list[SegmentPlace]] = {}
        first = 0
        for row, group in enumerate(groups):
            for rank, pieces in enumerate((_even_row if stage == 2 else _even_weights)(group, first, ranks)):
                self.rows[rank].append(pieces)
                offset = 0
                for piece in pieces:
                    self._places.setdefault(piece.weight, []).append(SegmentPlace(rank, row, offset, piece))
                    offset += piece.length
            first += len(group)

    def all_places(self, weight: int) -> list[SegmentPlace]:
        return self._places[weight]

    def places(self, weight: int, start: int, stop: int) -> Iterator[tuple[SegmentPlace, int, int]]:
        """Yields the places of some values of a weight, each with the first and last value in it."""
        for place in self._places[weight]:
            begin, end = max(place.piece.start, start), min(place.piece.stop, stop)
            if begin < end:
                yield place, begin, end


def weight_sizes(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    return [[getattr(weight, "ds_numel", weight.numel()) for weight in group] for group in groups]


def row_length(pieces: Sequence[WeightSegment]) -> int:
    return sum(piece.length for piece in pieces)


def _even_row(group: Sequence[int], first: int, ranks: int) -> Iterator[list[WeightSegment]]:
    share = -(-sum(group) // (ALIGNMENT * ranks)) * ALIGNMENT
    for rank in range(ranks):
        pieces, at = [], 0
        for weight, size in enumerate(group, first):
            start, stop = (min(max(edge * share - at, 0), size) for edge in (rank, rank + 1))
            if start < stop:
                pieces.append(WeightSegment(weight, start, stop))
            at += size
        missing = share - row_length(pieces)
        yield [*pieces, WeightSegment(first + len(group) - 1, group[-1], group[-1], missing)] if missing else pieces


def _even_weights(group: Sequence[int], first: int, ranks: int) -> Iterator[list[WeightSegment]]:
    for rank in range(ranks):
        pieces = []
        for weight, size in enumerate(group, first):
            share = -(-size // ranks)
            start, stop = (min(edge * share, size) for edge in (rank, rank + 1))
            pieces.append(WeightSegment(weight, start, stop, share - (stop - start)))
        yield pieces


class SavedPartitions:
    """A checkpoint's parts of all ranks, read lazily: rows of `parts` are slices of files."""

    def __init__(self, checkpoint: str, ranks: int, groups: Sequence[Sequence[int]]) -> None:
        self.parts = [
            zero_format.read(os.path.join(checkpoint, zero_format.file_name(rank)), lazily=True)
            for rank in range(ranks)
        ]
        self.stage = next((stage for stage in MASTERS if MASTERS[stage] in self.parts[0]), 0)
        if not self.stage:
            raise DamagedError(f"{zero_format.file_name(0)} holds no state of ZeRO.")
        if self.stage == 3:
            # Rows of stage 3 depend on the number of processes where they are long.
            groups = _regrouped(
                [size for group in groups for size in group],
                [row.get_shape()[0] for row in self.parts[0][MASTERS[3]]],
                ranks,
            )
        self.cut = Partitioning(self.stage, groups, ranks)
        for rank, part in enumerate(self.parts):
            # Stage 2 saves its masters without the zeros at their end.
            shapes = [[row_length(row) - (row[-1].padding if self.stage == 2 else 0)] for row in self.cut.rows[rank]]
            saved = [row.get_shape() for row in part[MASTERS[self.stage]]]
            if saved != shapes or any(map(any, part.get("param_alignment_paddings", []))):
                name = zero_format.file_name(rank)
                raise DamagedError(f"{name} is not cut as by DeepSpeed {zero_format.VERSION}.")

    @property
    def settings(self) -> list[StateDict]:
        groups: list[StateDict] = self.optimizer(0)["param_groups"]
        return groups

    def optimizer(self, rank: int) -> StateDict:
        state: StateDict = self.parts[rank][OPTIMIZER_STATES[self.stage]]
        return state

    def part(self, own: StateDict, cut: Partitioning, rank: int) -> StateDict:
        """Returns the state of a process among those of a cut; `own` is DeepSpeed's at the start."""
        mine = own[OPTIMIZER_STATES[self.stage]]["param_groups"]
        rows = cut.rows[rank]
        optimizer = {
            "state": {row: self.state(pieces) for row, pieces in enumerate(rows)},
            "param_groups": [
                {**saved, "params": now["params"]} for saved, now in zip(self.settings, mine, strict=True)
            ],
        }
        masters = [self.row(MASTER, pieces) for pieces in rows]
        return {**own, OPTIMIZER_STATES[self.stage]: optimizer, MASTERS[self.stage]: masters}

    def is_row(self, rank: int, row: int, kind: str) -> bool:
        """Tells whether an entry of the optimizer's own state has a value for each one of a row."""
        value = self.optimizer(rank)["state"][row][kind]
        return hasattr(value, "get_shape") and value.get_shape() == [row_length(self.cut.rows[rank][row])]

    def row(self, kind: str, pieces: Sequence[WeightSegment]) -> torch.Tensor:
        """Returns a row that is cut in another way."""
        parts = []
        for piece in pieces:
            for place, begin, end in self.cut.places(piece.weight, piece.start, piece.stop):
                at = place.offset + begin - place.piece.start
                parts.append(self._held(kind, place)[at : at + end - begin])
            parts.append(torch.zeros(piece.padding, dtype=parts[-1].dtype if parts else torch.float32))
        return torch.cat(parts)

    def state(self, pieces: Sequence[WeightSegment]) -> StateDict:
        place, _, _ = next(self.cut.places(pieces[0].weight, 0, pieces[0].stop or 1))
        entries = self.optimizer(place.rank)["state"].get(place.row, {})
        return {
            # A copy: optimizers count their steps in place, and one count for several weights would run ahead.
            kind: self.row(kind, pieces) if self.is_row(place.rank, place.row, kind) else copy.deepcopy(value)
            for kind, value in entries.items()
        }

    def _held(self, kind: str, place: SegmentPlace) -> Any:
        if kind == MASTER:
            return self.parts[place.rank][MASTERS[self.stage]][place.row]
        return self.optimizer(place.rank)["state"][place.row][kind]


def _regrouped(left: list[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns sizes of weights by row, given the lengths of a process's rows."""
    groups: list[list[int]] = []
    for wanted in lengths:
        groups.append([])
        while left and sum(-(-size // ranks) for size in groups[-1]) < wanted:
            groups[-1].append(left.pop(0))
    if left:
        raise DamagedError(f"{zero_format.file_name(0)} has fewer values than the model.")
    return groups


ZERO_BUCKET = 50_000_000  # values joined at a time; DeepSpeed's own default takes ten times the memory
# These follow from recipe and model: a scale of 1 (fp16 is refused), the recipe's own clipping, each weight's place.
NOT_KEPT_BY_ZERO = ("loss_scaler", "clip_grad", "zero_stage", "param_slice_mappings")


def deepspeed_arguments(recipe: Recipe) -> Options:
    zero_format.require_package(recipe)
    if recipe.resources.gpus == 0:
        # Before anybody asks DeepSpeed. By gloo alone: it would compile its own communication at first use.
        os.environ["DS_ACCELERATOR"] = "cpu"  # also on a machine with GPUs
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    stage = recipe.parallel.zero_stage
    settings: Options = {"stage": stage, "reduce_bucket_size": ZERO_BUCKET}
    if stage == 3:
        settings["stage3_gather_16bit_weights_on_model_save"] = True
    if recipe.parallel.offload == "cpu":
        host = {"device": "cpu", "pin_memory": recipe.resources.gpus > 0}
        settings |= {"offload_optimizer": host} | ({"offload_param": host} if stage == 3 else {})
    config = {
        "zero_optimization": settings,
        "zero_force_ds_cpu_optimizer": False,  # the recipe's optimizer, also where it runs on the host
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    return {"deepspeed": config}


class Zero(ChunkTrainer):
    """Mixin: saves and restores what DeepSpeed splits over the processes."""

    saves_weights_beside = False  # all ranks gather them, and in one order

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Else Accelerate warns that DeepSpeed accumulates more steps than it.
        self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps

    def optimizer_state(self) -> StateDict:
        return {name: value for name, value in super().optimizer_state().items() if name not in NOT_KEPT_BY_ZERO}

    def trained(self) -> list[list[torch.nn.Parameter]]:
        optimizer = self.deepspeed.optimizer
        rows: list[list[torch.nn.Parameter]]  # as DeepSpeed cuts them
        rows = optimizer.fp16_groups if _splits_weights(optimizer) else optimizer.bit16_groups
        return rows

    def num_parts(self) -> int:
        ranks = Ranks.here()
        return ranks.size // ranks.nodes

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> object:
        # transformers 5.23 has DeepSpeed load the checkpoint here, which would unpickle files that come from a bucket.
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        optimizer = self.deepspeed.optimizer
        if _splits_weights(optimizer):
            _clear_padding(optimizer)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        return prepared

    def read_optimizer(self, checkpoint: str) -> None:
        self._load_part(checkpoint)
        # Under DeepSpeed transformers 5.23 restores the schedule alone.
        super().read_optimizer(checkpoint)

    def _load_part(self, checkpoint: str) -> None:
        optimizer = self.deepspeed.optimizer
        rank, size = self.args.process_index, self.args.world_size
        if self.resumption.is_reshaped:
            sizes = weight_sizes(self.trained())
            of_all = SavedPartitions(checkpoint, self.resumption.ranks, sizes)
            saved = of_all.part(self.optimizer_state(), Partitioning(of_all.stage, sizes, size), rank)
        else:
            saved = zero_format.read(os.path.join(checkpoint, zero_format.file_name(rank)))
        # DeepSpeed expects the states of all ranks, and reads its own.
        parts: list[StateDict | None] = [None] * size
        parts[rank] = {**saved, "loss_scaler": optimizer.loss_scaler}
        _load_buffers(self.model, checkpoint)
        if _splits_weights(optimizer):
            optimizer.checkpoint_event_prologue()
        optimizer.load_state_dict(parts, load_optimizer_states=True, load_from_fp32_weights=True)
        if _splits_weights(optimizer):
            optimizer.checkpoint_event_epilogue()
        else:  # weights from their masters, as a step would make them
            optimizer.update_lp_params()

    def write_optimizer(self, output_dir: str) -> None:
        zero_format.write(
            os.path.join(output_dir, zero_format.file_name(self.args.process_index)), self.optimizer_state()
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def write_weights(self, output_dir: str | None, *, internal: bool) -> None:
        # Stage 2 has all weights in each process, which `Trainer` would copy first.
        if _splits_weights(self.deepspeed.optimizer):
            super().write_weights(output_dir, internal=internal)
        else:
            self._save(output_dir)


def _splits_weights(optimizer: Any) -> bool:
    """Tells whether no process has the whole model, which is stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _clear_padding(optimizer: Any) -> None:
    # After a weight's last value DeepSpeed keeps whatever was in memory. Nothing computes with it, but it is saved.
    rank = Ranks.here().rank
    for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        at = 0
        for weight in group:
            part = weight.ds_tensor
            real = min(max(weight.ds_numel - rank * part.numel(), 0), part.numel())
            masters.data[at + real : at + part.numel()] = 0
            part.data[real:].zero_()
            at += part.numel()


def _load_buffers(model: torch.nn.Module, checkpoint: str) -> None:
    # Each process has all buffers.
    buffers = dict(model.named_buffers())
    for name in os.listdir(checkpoint):
        if not (name.startswith("model") and name.endswith(".safetensors")):
            continue
        with safe_open(os.path.join(checkpoint, name), framework="pt") as file:
            for kept in buffers.keys() & file.keys():
                buffers[kept].copy_(file.get_tensor(kept))


class Fsdp(ChunkTrainer):
    """Mixin: shards on CPUs too, and completes Accelerate's sharded checkpoints.

    A checkpoint of one process, which is whole, is split when it is restored.
    """

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.use_cpu:
            # For this call alone: on CPUs Accelerate would silently ignore the FSDP plugin, and train with DDP.
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        if self.args.use_cpu:
            PartialState().distributed_type = DistributedType.FSDP

    @property
    def splits(self) -> bool:
        """Whether the checkpoint is whole, and is to be in shards."""
        return self.resumption.is_reshaped and self.resumption.ranks == 1

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> object:
        # transformers 5.23 loads weights after this, when the model is in shards; those that are whole come before.
        if resume_from_checkpoint is not None and self.splits:
            self.is_fsdp_enabled = False
            super().read_weights(resume_from_checkpoint)
            self.is_fsdp_enabled = True
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def read_weights(self, checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.splits:
            super().read_weights(checkpoint, model)

    def read_optimizer(self, checkpoint: str) -> None:
        if not self.splits and not sharded.is_unused(checkpoint):
            super().read_optimizer(checkpoint)
            return
        schedule = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
        if not self.splits:
            # All earlier steps were skipped: torch would ask for moments that the optimizer has not made.
            self.lr_scheduler.load_state_dict(schedule)
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        # Mapped, as each process needs only its part.
        saved = torch.load(os.path.join(checkpoint, "optimizer.pt"), weights_only=True, mmap=True)
        names = {weight: name for name, weight in self.model.named_parameters()}
        order = [names[weight] for group in self.trained() for weight in group]
        state: StateDict = {
            "state": {order[number]: entries for number, entries in saved["state"].items()},
            "param_groups": [
                {**group, "params": [order[number] for number in group["params"]]} for group in saved["param_groups"]
            ],
        }
        set_optimizer_state_dict(
            self.model, self.bare_optimizer(), state, options=StateDictOptions(full_state_dict=True)
        )
        self.lr_scheduler.load_state_dict(schedule)

    def write_weights(self, output_dir: str | None, *, internal: bool) -> None:
        if not internal:
            super().write_weights(output_dir, internal=internal)
        elif self.args.should_save:  # the rest of a model, without its shards
            if self.recipe.adapter:
                adapter = copy.copy(self.model.active_peft_config)
                adapter.inference_mode = True  # as PEFT saves it
                adapter.save_pretrained(output_dir)
            else:
                self.model.config.save_pretrained(output_dir)
                if self.model.can_generate():
                    self.model.generation_config.save_pretrained(output_dir)
            self.processing_class.save_pretrained(output_dir)


def sharding_arguments(recipe: Recipe) -> Options:
    uncompiled = {"torch_compile": False, "torch_compile_mode": None}  # `compile_first` does it, and once is enough
    if not recipe.parallel.is_sharded:
        return uncompiled
    if recipe.parallel.is_zero:
        return {**deepspeed_arguments(recipe), **uncompiled}
    config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "cpu_offload": recipe.parallel.offload == "cpu"}
    return {"fsdp": True, "fsdp_config": config, **uncompiled}


def compile_first(model: PreTrainedModel, recipe: Recipe) -> None:
    mode = compile_mode(recipe.training)
    if mode:
        # In place, before the model is wrapped. In shards by block: a block is gathered at once.
        for part in trainable.blocks(model) if recipe.parallel.is_sharded else [model]:
            part.compile(mode=mode)


def compile_mode(training: Training) -> str | None:
    return ("default" if training.compile else None) if isinstance(training.compile, bool) else training.compile
