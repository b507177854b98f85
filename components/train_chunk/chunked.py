"""What every method's trainer has in front of TRL's: exact resume, order of rows, groups of parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from components.shared import hooks, trainable
from components.shared.recipe import Recipe
from components.train_chunk import ordering, sharding
from components.train_chunk.parameters import Grouped
from components.train_chunk.resumable import Resumable
from components.train_chunk.router import Routed
from components.train_chunk.sharding import Sharded
from components.train_chunk.zero import Zero

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Chunked(Resumable, Zero, Sharded, Grouped, Routed):
    """Mixin for a method's trainer."""

    recipe: Recipe | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Returns the recipe's order of rows, else the method's own."""
        trainer: Any = self
        rows = trainer.train_dataset  # with all columns; what is given here has lost those that the model does not read
        chosen = ordering.sampler(self.recipe, rows, trainer.args.max_steps) if self.recipe else None
        return chosen or super()._get_train_sampler(train_dataset)  # type: ignore[misc]


class EpochOf(TrainerCallback):
    """Tells a collator the epoch; workers begin anew with each epoch, so it reaches them too."""

    stateless = True

    def __init__(self, collator: hooks.SeededCollator) -> None:
        self._collator = collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Passes the number on."""
        self._collator.epoch = int(state.epoch or 0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a method's trainer is built from.

    Attributes:
        recipe: The resolved recipe.
        arguments: Keyword arguments for the method's configuration class.
        model: What is trained.
        tokenizer: Its tokenizer.
        train: Tokenized training rows.
        held_out: Tokenized held-out rows, None where nothing is evaluated in between.
        reference: Returns a fresh copy of the model that the run began with.
    """

    recipe: Recipe
    arguments: dict[str, Any]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    held_out: Dataset | None
    reference: Callable[[], PreTrainedModel] = field(repr=False)

    def trainer(self, kind: type[Trainer], config: Any, **extra: Any) -> Trainer:
        """Builds the method's trainer.

        Args:
            kind: Its class, `Chunked` among its bases.
            config: Its configuration.
            extra: Further arguments of its own.
        """
        recipe = self.recipe
        own: dict[str, Any] = {
            "data_collator": hooks.collator(recipe.hooks, self.tokenizer, recipe.seed),
            "compute_metrics": hooks.metrics(recipe.hooks),
            "callbacks": [*_early_stopping(recipe), *hooks.callbacks(recipe.hooks)] or None,
            "peft_config": trainable.lora(recipe),
        }
        if recipe.hooks.trainer:
            kind = type(kind.__name__, (hooks.find(recipe.hooks.trainer), kind), {})
        trainer: Any = kind(
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
        if recipe.adapter is None:
            # Under the names in memory: those of a mixture's original format differ, and `Trainer` loads a checkpoint
            # without converting them back.
            save = functools.partial(self.model.save_pretrained, save_original_format=False)
            self.model.save_pretrained = save  # type: ignore[method-assign]
        if isinstance(own["data_collator"], hooks.SeededCollator):
            trainer.add_callback(EpochOf(own["data_collator"]))
        trainer.recipe = recipe
        trainer.groups = tuple(recipe.training.groups)
        trainer.compile_optimizer = recipe.training.compile_optimizer
        if trainer.args.world_size > 1:
            sharding.compile_first(trainer.model, recipe)
        if recipe.training.router:
            trainer.watch_router(recipe.training.router)
        if recipe.training.fp16_initial_scale:
            scaler = trainer.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": recipe.training.fp16_initial_scale})
        return trainer  # type: ignore[no-any-return]

    def has_reference(self, beta: float = 1.0) -> bool:
        """Tells whether a copy of the start model is needed; an adapter's reference is its base."""
        return self.recipe.adapter is None and beta > 0


def _without_dropout(model: nn.Module) -> None:
    """Switches off dropout that layers hold as a number, as Llama's attention does; TRL finds `nn.Dropout` alone."""
    for layer in model.modules():
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def _early_stopping(recipe: Recipe) -> list[EarlyStoppingCallback]:
    stopping = recipe.training.early_stopping
    return [EarlyStoppingCallback(stopping.patience, stopping.threshold)] if stopping else []
