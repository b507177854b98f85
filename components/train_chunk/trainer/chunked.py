"""The mixin that every method's trainer has before TRL's, and what such a trainer is built from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState, TrainingArguments

from baton.components.shared.models import frozen, trainable
from baton.components.shared.models.own_code import hooks
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk.data import samplers
from baton.components.train_chunk.trainer import sharding
from baton.components.train_chunk.trainer.base import ChunkTrainer, Options, StateDict
from baton.components.train_chunk.trainer.guard import Guarded
from baton.components.train_chunk.trainer.joining import Joined
from baton.components.train_chunk.trainer.parameters import Grouped
from baton.components.train_chunk.trainer.resumable import Resumable
from baton.components.train_chunk.trainer.router import Routed
from baton.components.train_chunk.trainer.sharding import Sharded
from baton.components.train_chunk.trainer.virtual import Virtual
from baton.components.train_chunk.trainer.zero import Zero

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Chunked(Guarded, Virtual, Resumable, Zero, Joined, Sharded, Grouped, Routed):
    """Mixin for a method's trainer."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        """Returns the recipe's order of rows, else the method's own."""
        rows = self.train_dataset  # with all columns; `train_dataset` has lost those that the model does not read
        return samplers.sampler(self.recipe, rows, self.args.max_steps) or super()._get_train_sampler(train_dataset)

    def method_state(self) -> StateDict:
        """Returns the buffers that the method's spec names."""
        buffers = self.recipe.training.spec.buffers
        return {**super().method_state(), **{name: getattr(self, attribute) for name, attribute in buffers.items()}}

    def load_method_state(self, saved: StateDict) -> None:
        """Restores them."""
        super().load_method_state(saved)
        for name, attribute in self.recipe.training.spec.buffers.items():
            setattr(self, attribute, saved[name])


class EpochOf(TrainerCallback):
    """Tells a collator the epoch; workers begin anew with each epoch, so it reaches them too."""

    stateless = True

    def __init__(self, collator: hooks.SeededCollator) -> None:
        self._collator = collator

    def on_epoch_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Passes the number on."""
        self._collator.epoch = int(state.epoch or 0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, data and settings that a method's trainer is built from.

    Attributes:
        recipe: The resolved recipe.
        arguments: Keyword arguments for the method's configuration class.
        model: What is trained.
        tokenizer: Its tokenizer.
        train: Tokenized training rows.
        held_out: Tokenized held-out rows, None where nothing is evaluated in between.
        reference: Returns a fresh copy of the model that the run began with.
        second_model: Loads the second model that the method's settings name.
        weighs: Whether rows and tokens count alike, not batches; see `ChunkTrainer`.
    """

    recipe: Recipe
    arguments: Options
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    held_out: Dataset | None
    reference: Callable[[], PreTrainedModel] = field(repr=False)
    second_model: Callable[[], PreTrainedModel] = field(repr=False)
    weighs: bool = True

    def trainer(self, kind: type[ChunkTrainer], config: TrainingArguments, **extra: object) -> ChunkTrainer:
        """Builds the method's trainer.

        Args:
            kind: Its class, `Chunked` among its bases.
            config: Its configuration.
            extra: Further arguments of that class.
        """
        recipe = self.recipe
        rows = trainable.rows_of_tokens(recipe, self.model, self.tokenizer)
        own = {
            "data_collator": hooks.collator(recipe.hooks, self.tokenizer, recipe.seed),
            "compute_metrics": hooks.metrics(recipe.hooks),
            "callbacks": [*_early_stopping(recipe), *hooks.callbacks(recipe.hooks)] or None,
            "peft_config": trainable.lora(recipe, rows),
        }
        if recipe.hooks.trainer:
            # The user's class first: its `super()` reaches Baton's mixins, and theirs TRL's trainer.
            kind = type(kind.__name__, (hooks.find(recipe.hooks.trainer), kind), {})
        trainer: Chunked = kind(
            model=self.model,
            args=config,
            train_dataset=self.train,
            eval_dataset=self.held_out,
            processing_class=self.tokenizer,
            **{name: value for name, value in own.items() if value is not None},
            **extra,
        )
        if getattr(config, "disable_dropout", False):
            _without_dropout(trainer.model)
        if rows:
            trainable.complete(trainer.model)
        _save_as_meant(trainer, self.model, recipe, rows)
        if isinstance(own["data_collator"], hooks.SeededCollator):
            trainer.add_callback(EpochOf(own["data_collator"]))
        trainer.recipe, trainer.weighs = recipe, self.weighs
        trainer.groups = tuple(recipe.training.groups)
        trainer.compile_optimizer = recipe.training.compile_optimizer
        if trainer.args.world_size > 1:
            sharding.compile_first(trainer.model, recipe)
        if recipe.training.router:
            trainer.watch_router(recipe.training.router)
        if recipe.training.fp16_initial_scale:
            scaler = trainer.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": recipe.training.fp16_initial_scale})
        return trainer

    def with_reference(self) -> Options:
        """Returns the argument of a trainer that holds the model to a reference; an adapter's is its base."""
        has_reference = self.recipe.training.has_reference(adapter=self.recipe.adapter is not None)
        return {"ref_model": self.reference()} if has_reference else {}


def _save_as_meant(trainer: Chunked, model: PreTrainedModel, recipe: Recipe, rows: trainable.Rows | None) -> None:
    """Sets how the model is written to a checkpoint."""
    if rows:
        # PEFT would write the whole embedding where it is larger than the base's, beside the rows that are trained.
        trainer.model.save_pretrained = functools.partial(trainer.model.save_pretrained, save_embedding_layers=False)
    if recipe.adapter is None:
        # Under the names in memory: those of a mixture's original format differ, and `Trainer` loads a checkpoint
        # without converting them back.
        model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)
        if recipe.training.trainable:
            model.save_pretrained = frozen.apart(model, model.save_pretrained)


def _without_dropout(model: nn.Module) -> None:
    """Switches off dropout that layers hold as a number, as Llama's attention does; TRL finds `nn.Dropout` alone."""
    for layer in model.modules():
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def _early_stopping(recipe: Recipe) -> list[EarlyStoppingCallback]:
    stopping = recipe.training.early_stopping
    return [EarlyStoppingCallback(stopping.patience, stopping.threshold)] if stopping else []
