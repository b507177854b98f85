"""Protocol of a trainer that trains in chunks: names that its mixins share and checkpointing reads.

A chunk's stage imports this module, so it must not import torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from baton.checkpoint.staging import PendingCheckpoint
from baton.recipe.recipe import Recipe
from baton.recipe.training import Guard
from baton.train.distributed import Ranks, Watchdog

if TYPE_CHECKING:
    import torch
    from torch import nn

    # Mixins come before one of TRL's trainers in the bases. At run time they have no base of their own, so that
    # `super()` reaches that trainer.
    from transformers import Trainer as Upstream

    from baton.train.fork import ForkOverrides
else:
    Upstream = object

Options = dict[str, Any]  # keyword arguments of an upstream class
StateDict = dict[str, Any]  # nested containers of tensors and plain values

Window = dict[str, list[float]]  # values to average at the next log, by name
PER_RANK_PARTS = ("rng", "log")  # parts of the state that differ between ranks in every method


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The state that a trainer resumes from; by default the start of a run."""

    folder: str | None = None
    digests: dict[str, str] = field(default_factory=dict)  # part of the state → its digest at the capture
    carried: dict[str, str] = field(default_factory=dict)  # where the user's code keeps a value → its digest
    left_out: tuple[str, ...] = ()  # removed from the folder by a negative control, and not compared
    takeover: ForkOverrides | None = None
    ranks: int = 1  # as many made the checkpoint
    strategy: str = "ddp"  # by which they had split the state
    max_steps: int | None = None  # as saved, where the run's end has moved since
    is_reshaped: bool = False  # made by another number of ranks than resume
    skips: tuple[int, ...] = ()  # found by the run's guard, in order, without the recipe's own


class ChunkTrainer(Upstream):
    """Base of the mixins that come before one of TRL's trainers."""

    recipe: Recipe
    ranks: Ranks = Ranks()
    watchdog: Watchdog = Watchdog()
    resumption: Resumption = Resumption()
    # The current step's checkpoint in each place to write it to, best first.
    places: Callable[[], Iterator[PendingCheckpoint]] = staticmethod(lambda: iter(()))
    restored_rng: str | None = None  # digest right after the restore
    guard: Guard | None = None  # None also while the trainer is only tried out
    skipped: tuple[int, ...] = ()  # steps
    # Loss and gradient norm of the newest steps that the guard kept; without a guard as restored, for a fork's parent.
    guard_window: tuple[tuple[float, float], ...] = ()
    figures: tuple[float, ...] = ()  # loss and gradient norm of a step that all ranks judge together
    # Whether rows or tokens count equally, however they are cut into batches; else batches do, as in `loss` format 1.
    weighs: bool = False
    weighed: dict[str, float]  # `figure_weights` of an evaluation's newest batch
    counted_whole: tuple[float, float] = (0.0, 0.0)  # rows and tokens of a step or evaluation that `has_likelihood`

    def begin_chunk(
        self,
        ranks: Ranks,
        watchdog: Watchdog,
        resumption: Resumption,
        places: Callable[[], Iterator[PendingCheckpoint]],
    ) -> None:
        """Sets the attributes that only a chunk knows, before its callbacks are made."""
        raise NotImplementedError

    def end_at(self, last_step: int, epochs: int) -> None:
        """Ends the run at an earlier step, in a pass over the rows, as if it had been given as `max_steps`."""
        raise NotImplementedError

    def figure_weights(self, inputs: Any) -> dict[str, float]:
        """Returns a batch's weights in an evaluation by figure, `""` for all others: by default its number of rows."""
        from transformers.trainer_pt_utils import find_batch_size

        return {"": float(find_batch_size(inputs) or 1)}

    def evaluated_rows(self, figure: str) -> list[tuple[float, float]]:
        """Returns value and weight of each row of the newest evaluation, in order, for a figure that is their mean.

        Empty where the figure is no such mean. Every rank takes part. Rows evaluated in one batch count as one.
        """
        return []

    @property
    def has_likelihood(self) -> bool:
        """Whether a loss that is a mean over rows has a part that is a mean over tokens."""
        return False

    def likelihood_tokens(self, inputs: Any) -> int:
        """Returns the number of tokens over which that part of a batch's loss is a mean."""
        raise NotImplementedError

    def token_share(self, inputs: Any) -> float:
        """Returns that part's factor in a loss that counts by rows: 1 if a batch is the whole."""
        if not (self.weighs and self.counted_whole[1]):
            return 1.0
        from transformers.trainer_pt_utils import find_batch_size

        rows, tokens = self.counted_whole
        return self.likelihood_tokens(inputs) * rows / (find_batch_size(inputs) * tokens)

    def enter_training(self, model: nn.Module) -> None:
        """Begins a pass in training mode, by which TRL logs: an evaluation may have come before."""
        model.train()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    @property
    def skips_step(self) -> bool:
        return False

    def skip_step(self, model: nn.Module, inputs: Any) -> None:
        """Does the part of a skipped step's pass that later steps need."""

    def judge(self, figures: Sequence[Sequence[float]]) -> None:
        """Judges a step by all ranks' figures, and raises `SkipError` in all ranks if the run is to skip it."""

    @property
    def per_rank_parts(self) -> tuple[str, ...]:
        if self.recipe.parallel.virtual_workers:
            return ()
        return (*PER_RANK_PARTS, "method") if self.recipe.training.spec.generates else PER_RANK_PARTS

    @property
    def writes_part(self) -> bool:
        return self.ranks.is_first or not self.recipe.parallel.virtual_workers

    @property
    def windows(self) -> dict[str, Window]:
        """TRL's values to average at the next log, by mode; its experimental trainers use another name."""
        return getattr(self, "_metrics", None) or getattr(self, "_stored_metrics", {})

    def checkpoint_folder(self) -> str:
        """Returns the folder to which `Trainer` writes the current step's checkpoint."""
        return os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")

    def method_state(self) -> StateDict:
        """Returns the method's state between steps that `Trainer` does not save."""
        return {}

    def load_method_state(self, saved: StateDict) -> None:
        """Restores a `method_state`."""

    def load_skipped(self, saved: tuple[int, ...]) -> None:
        self.skipped = saved

    def optimizer_state(self) -> StateDict:
        """Returns the optimizer's state, or this rank's part if it is split."""
        return dict(self.optimizer.state_dict())

    def bare_optimizer(self) -> torch.optim.Optimizer:
        """Returns torch's optimizer without Accelerate's wrapper."""
        return cast("torch.optim.Optimizer", getattr(self.optimizer, "optimizer", self.optimizer))

    def trained(self) -> list[list[torch.nn.Parameter]]:
        """Returns the trained weights by group of the optimizer."""
        return [group["params"] for group in self.optimizer.param_groups if group["params"]]

    def num_parts(self) -> int:
        """Returns the number of this machine's ranks that each write a part of the optimizer's state."""
        return 1


@contextlib.contextmanager
def replaced(thing: Any, **attributes: Any) -> Iterator[None]:
    """Gives an object attributes of its own, and then those that it had before."""
    before = {name: vars(thing)[name] for name in attributes if name in vars(thing)}
    vars(thing).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            delattr(thing, name)  # without one of its own, its class's shows again
        vars(thing).update(before)


def all_counted(accelerator: Any) -> contextlib.AbstractContextManager[None]:
    """Makes an accelerator gather all processes' figures whole, without repeated rows."""
    # At a loader's end Accelerate cuts what it gathers to the remaining rows, and a loader that resumes within the pass
    # counts these differently.
    return replaced(accelerator, gather_for_metrics=accelerator.gather)
