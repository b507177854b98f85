"""Takes a trainer over for the time of a chunk, and gives it back: class, arguments, callbacks, modes of torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from baton.components.shared.models.own_code import hooks
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk import uncompiled
from baton.components.train_chunk.attached import mixins, orders
from baton.components.train_chunk.attached.mixins import Attached

CHANGED: dict[str, Any] = {
    "save_strategy": SaveStrategy.NO,  # the checkpoint callback alone says when
    "save_total_limit": None,  # retention is of the store
    "save_only_model": False,
    "push_to_hub": False,
    "restore_callback_states_from_checkpoint": False,  # it replaces callbacks; theirs is restored in place
    "dataloader_persistent_workers": False,  # workers that begin anew know the epoch
}
"""Arguments as a chunk has them."""
PUT_BACK = (
    *("data_collator", "optimizer", "lr_scheduler", "_created_lr_scheduler"),
    *("_total_train_tokens", "_current_train_step_time"),
)
"""Attributes of trainers that another chunk begins with as this one did."""
DRAWS_NOTHING = ("trl.", "transformers.data.data_collator")
"""Modules of collators that draw no random numbers, unless they mask."""


class TellsEpoch(TrainerCallback):
    """Tells what draws random numbers for rows which epoch it is."""

    stateless = True

    def __init__(self, trainer: Attached) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Passes the number on; workers begin anew with each epoch, so it reaches them too."""
        for drawing in (*self._trainer.drawing, self._trainer.data_collator):
            if isinstance(drawing, orders.Seeded | hooks.SeededCollator):
                drawing.epoch = int(state.epoch or 0)


@contextlib.contextmanager
def taken(trainer: Trainer, recipe: Recipe, *, resumes: bool) -> Iterator[Attached]:
    """Yields a trainer as one that trains in chunks.

    Args:
        trainer: The trainer.
        recipe: What a recipe would say of the run, see `framing`.
        resumes: Whether there is a checkpoint to resume from.
    """
    with contextlib.ExitStack() as undoing:
        undoing.enter_context(_modes())
        before, args = dict(vars(trainer)), trainer.args
        undoing.callback(_put_back, trainer, type(trainer), before, trainer.callback_handler.callbacks[:])
        changed = {**CHANGED, "output_dir": args.output_dir, **({"eval_on_start": False} if resumes else {})}
        for name, value in changed.items():
            undoing.callback(setattr, args, name, getattr(args, name))
            setattr(args, name, value)
        trainer.__class__ = mixins.exact_class(trainer)
        attached = cast(Attached, trainer)
        attached.recipe = recipe
        if draws(trainer.data_collator):
            trainer.data_collator = hooks.SeededCollator(trainer.data_collator, args.seed)
        for callback in trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith(("transformers.integrations", "transformers.utils.notebook")):
                callback.stateless = True  # it shows and reports: nothing that it keeps changes training
        trainer.add_callback(TellsEpoch(attached))
        if isinstance(trainer.train_dataset, torch.utils.data.IterableDataset):
            trainer.add_callback(orders.OnePass())
        if isinstance(trainer.model, PreTrainedModel):
            # Under the names in memory: `Trainer` loads a checkpoint without converting those of the original format.
            saved = functools.partial(trainer.model.save_pretrained, save_original_format=False)
            undoing.callback(vars(trainer.model).pop, "save_pretrained")
            vars(trainer.model)["save_pretrained"] = saved
        yield attached


def draws(collator: Callable[..., Any]) -> bool:
    """Tells whether a collator may draw random numbers: all but those known to draw none."""
    module = getattr(collator, "__module__", type(collator).__module__)
    masks = getattr(collator, "mlm", False) or "Permutation" in type(collator).__name__
    return masks or not module.startswith(DRAWS_NOTHING)


def _put_back(trainer: Trainer, kind: type[Trainer], before: dict[str, Any], callbacks: list[TrainerCallback]) -> None:
    """Makes a trainer what it was, but for the weights: what else training has changed is in the checkpoint."""
    trainer.__class__ = kind
    trainer.callback_handler.callbacks = callbacks
    for name in (*PUT_BACK, *mixins.BUFFERS.values()):
        if name in before:
            setattr(trainer, name, before[name])
    for window in getattr(trainer, "_metrics", {}).values():
        window.clear()
    ours = {name for base in mixins.Writing.__mro__ for name in (*vars(base), *getattr(base, "__annotations__", ()))}
    for name in (ours & vars(trainer).keys()) - before.keys():
        delattr(trainer, name)


@contextlib.contextmanager
def _modes() -> Iterator[None]:
    """Puts back what bits depend on in this process: a notebook goes on after its chunk."""
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode() == 2
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmarks, checks = torch.backends.cudnn.benchmark, torch.serialization.get_crc32_options()
    shows = transformers.utils.logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        uncompiled.use_deterministic(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmarks
        torch.serialization.set_crc32_options(checks)
        if shows:
            transformers.utils.logging.enable_progress_bar()
