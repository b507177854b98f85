"""DeepSpeed's ZeRO through Accelerate: its settings, and checkpoints of it that nobody has to unpickle.

Its engine trains; optimizer, schedule and clipping are the recipe's. A checkpoint has the weights whole, as any other,
and each process's part of the optimizer beside them; see `baton.components.shared.checkpoints.zero`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils.data import DataLoader

from baton.components.shared.checkpoints import zero
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk.distributed.ranks import Ranks
from baton.components.train_chunk.trainer import partitions
from baton.components.train_chunk.trainer.base import ChunkTrainer, Options, StateDict

if TYPE_CHECKING:
    from typing import Protocol

    class Partitioned(Protocol):
        """A weight whose values DeepSpeed splits over the ranks."""

        ds_tensor: torch.Tensor
        ds_numel: int

    class Stage3(Protocol):
        """The parts of DeepSpeed's stage 3 optimizer that are used."""

        fp16_groups: list[list[Any]]
        fp32_partitioned_groups_flat: list[torch.Tensor]

        def checkpoint_event_prologue(self) -> None: ...
        def checkpoint_event_epilogue(self) -> None: ...
        def load_state_dict(self, parts: object, **options: bool) -> None: ...


BUCKET = 50_000_000
"""Values that are joined at a time. DeepSpeed's own default takes ten times the memory for it."""
NOT_KEPT = ("loss_scaler", "clip_grad", "zero_stage", "param_slice_mappings")
"""What of the state follows from the recipe and the model: a scale of 1 (fp16 is refused), the recipe's own clipping,
and where each weight lies."""


def arguments(recipe: Recipe) -> Options:
    """Returns the arguments of `TrainingArguments`; on CPUs, has DeepSpeed know that before anybody asks it.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    zero.require_package(recipe)
    if recipe.resources.gpus == 0:
        # By gloo alone on CPUs: what DeepSpeed has besides, it compiles when it is first used.
        os.environ["DS_ACCELERATOR"] = "cpu"  # also on a machine with GPUs
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    stage = recipe.parallel.zero_stage
    settings: Options = {"stage": stage, "reduce_bucket_size": BUCKET}
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
    """Mixin for a `Trainer`: keeps and restores what DeepSpeed splits over the processes."""

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, which is told of accumulation: it warns where DeepSpeed knows of more than it."""
        super().create_accelerator_and_postprocess()
        if self.is_zero:
            self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps

    def optimizer_state(self) -> StateDict:
        """Returns what the optimizer keeps between steps, of one that DeepSpeed splits without what is not kept."""
        whole = super().optimizer_state()
        return {name: value for name, value in whole.items() if name not in NOT_KEPT} if self.is_zero else whole

    def trained(self) -> list[list[torch.nn.Parameter]]:
        """Returns the weights that are trained, by group of the optimizer; of DeepSpeed's, by its rows of values."""
        if not self.is_zero:
            return super().trained()
        optimizer = self.deepspeed.optimizer
        rows: list[list[torch.nn.Parameter]]
        rows = optimizer.fp16_groups if _splits_weights(optimizer) else optimizer.bit16_groups
        return rows

    def num_parts(self) -> int:
        """Returns how many ranks of this machine write a part of the optimizer's state each."""
        ranks = Ranks.here()
        return ranks.size // ranks.nodes if self.is_zero else 1

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed trains."""
        return bool(self.is_deepspeed_enabled)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> object:
        """Prepares, and restores the state itself: DeepSpeed would unpickle it."""
        if not self.is_zero:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # Without the checkpoint: upstream would have DeepSpeed unpickle files that come from a bucket.
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        optimizer = self.deepspeed.optimizer
        if _splits_weights(optimizer):
            _clear_padding(optimizer)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_zero and checkpoint is not None:
            # A negative control leaves out the optimizer alone; with it in the file are the weights' masters.
            self._load_part(checkpoint, weights_alone="optimizer" in self.resumption.leave_out)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_part(self, checkpoint: str, *, weights_alone: bool = False) -> None:
        """Restores weights, their masters and the optimizer's state.

        Args:
            checkpoint: Local files of the checkpoint.
            weights_alone: Leave the optimizer's state as it is.

        Raises:
            DamagedError: the process's file is not what was written.
        """
        optimizer = self.deepspeed.optimizer
        rank, size = self.args.process_index, self.args.world_size
        if self.resumption.is_reshaped:
            sizes = partitions.sizes(self.trained())
            of_all = partitions.Saved(checkpoint, self.resumption.ranks, sizes)
            saved = of_all.part(self.optimizer_state(), partitions.Cut(of_all.stage, sizes, size), rank)
        else:
            saved = zero.read(os.path.join(checkpoint, zero.file_name(rank)))
        # DeepSpeed expects the states of all ranks, and reads its own.
        parts: list[StateDict | None] = [None] * size
        parts[rank] = {**saved, "loss_scaler": optimizer.loss_scaler}
        _load_buffers(self.model, checkpoint)
        if _splits_weights(optimizer):
            optimizer.checkpoint_event_prologue()
        optimizer.load_state_dict(parts, load_optimizer_states=not weights_alone, load_from_fp32_weights=True)
        if _splits_weights(optimizer):
            optimizer.checkpoint_event_epilogue()
        else:  # the weights are what a step would make of their masters
            optimizer.update_lp_params()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_zero:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        zero.write(os.path.join(output_dir, zero.file_name(self.args.process_index)), self.optimizer_state())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the weights, which with stage 2 each process has: `Trainer` would copy them first."""
        if self.is_zero and not _splits_weights(self.deepspeed.optimizer):
            self._save(output_dir)
        else:
            super().save_model(output_dir, _internal_call)


def _splits_weights(optimizer: object) -> TypeGuard[Stage3]:
    """Tells whether no process has the whole model, which is stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _clear_padding(optimizer: Stage3) -> None:
    """Sets to 0 what stands after a weight's last value where it does not divide evenly over the ranks.

    DeepSpeed leaves there what happened to be in memory. Nobody computes with it, but it is saved.
    """
    for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        for start, end, weights in _padding(group):
            masters.data[start:end] = 0
            weights.zero_()


def _padding(group: list[Partitioned]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields the padding of each weight of a group: where it lies in the group's masters, and itself."""
    rank, at = Ranks.here().rank, 0
    for weight in group:
        part = weight.ds_tensor
        real = min(max(weight.ds_numel - rank * part.numel(), 0), part.numel())
        yield at + real, at + part.numel(), part.data[real:]
        at += part.numel()


def _load_buffers(model: torch.nn.Module, checkpoint: str) -> None:
    """Restores what a model keeps besides weights, of which each process has all."""
    from safetensors import safe_open

    buffers = dict(model.named_buffers())
    for name in os.listdir(checkpoint):
        if not (name.startswith("model") and name.endswith(".safetensors")):
            continue
        with safe_open(os.path.join(checkpoint, name), framework="pt") as file:
            for kept in buffers.keys() & file.keys():
                buffers[kept].copy_(file.get_tensor(kept))
