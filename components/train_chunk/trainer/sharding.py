"""FSDP2 through Accelerate: on GPUs as it comes, on CPUs where Accelerate thinks of it only for GPUs."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch

from baton.components.shared.checkpoints import sharded
from baton.components.shared.models import trainable
from baton.components.shared.recipe import Recipe, Training
from baton.components.train_chunk.trainer import zero
from baton.components.train_chunk.trainer.base import ChunkTrainer, Options, StateDict

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel


class Sharded(ChunkTrainer):
    """Mixin for a `Trainer`: shards on CPUs too, and completes what Accelerate leaves out of a checkpoint in shards.

    A checkpoint of one process, which has all as a whole, is split when it is restored.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator.

        Accelerate applies its FSDP plugin only where ranks have a GPU each; on CPUs it would ignore it silently, and
        train with DDP.
        """
        from accelerate.state import DistributedType, PartialState

        on_cpu = self.args.fsdp_plugin_args is not None and self.args.use_cpu
        if on_cpu:
            # For this call alone: it is what makes Accelerate apply the plugin.
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        if on_cpu:
            PartialState().distributed_type = DistributedType.FSDP

    @property
    def splits(self) -> bool:
        """Whether the checkpoint is whole, and is to be in shards."""
        return bool(self.is_fsdp_enabled) and self.resumption.is_reshaped and self.resumption.ranks == 1

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> object:
        """Prepares; weights that are whole are loaded before, as long as the model is."""
        if resume_from_checkpoint is not None and self.splits:
            self.is_fsdp_enabled = False
            super()._load_from_checkpoint(resume_from_checkpoint)
            self.is_fsdp_enabled = True
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.splits:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.is_fsdp_enabled and not self.splits and sharded.is_unused(checkpoint):
            # All steps before it were skipped: torch would ask for moments that the optimizer has not made.
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            return
        if checkpoint is None or not self.splits:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        # Mapped, as each process needs its part alone.
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
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the weights; of a checkpoint in shards, what else makes a model: configuration and tokenizer."""
        if not (self.is_fsdp_enabled and _internal_call):
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            if self.recipe.adapter:
                adapter = copy.copy(self.model.active_peft_config)
                adapter.inference_mode = True  # as PEFT saves it
                adapter.save_pretrained(output_dir)
            else:
                self.model.config.save_pretrained(output_dir)
                if self.model.can_generate():
                    self.model.generation_config.save_pretrained(output_dir)
            self.processing_class.save_pretrained(output_dir)


def arguments(recipe: Recipe) -> Options:
    """Returns the arguments of `TrainingArguments` for several processes."""
    uncompiled = {"torch_compile": False, "torch_compile_mode": None}  # `compile_first` does it, and once is enough
    if not recipe.parallel.is_sharded:
        return uncompiled
    if recipe.parallel.is_zero:
        return {**zero.arguments(recipe), **uncompiled}
    config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "cpu_offload": recipe.parallel.offload == "cpu"}
    return {"fsdp": True, "fsdp_config": config, **uncompiled}


def compile_first(model: PreTrainedModel, recipe: Recipe) -> None:
    """Compiles a model, if the recipe asks for it, in place and before it is wrapped.

    One that will be in shards block by block: a block is what is brought together at once.
    """
    mode = compile_mode(recipe.training)
    if mode:
        for part in trainable.blocks(model) if recipe.parallel.is_sharded else [model]:
            part.compile(mode=mode)


def compile_mode(training: Training) -> str | None:
    """Returns how `torch.compile` is to work, None where it is not to."""
    return ("default" if training.compile else None) if isinstance(training.compile, bool) else training.compile
