"""The protocol of a trainer that trains in chunks: the names that its mixins share, and that checkpointing reads.

A chunk's stage imports this module, and no torch.
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
from baton.train.distributed.ranks import Ranks
from baton.train.distributed.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    from torch import nn

    # The mixins stand before one of TRL's trainers; alone they have no base, so that `super()` reaches that one.
    from transformers import Trainer as Upstream

    from baton.train.fork import ForkOverrides
else:
    Upstream = object

Options = dict[str, Any]
"""Keyword arguments of an upstream class."""
StateDict = dict[str, Any]
"""Tensors and plain values in nested containers, as torch saves them."""

Window = dict[str, list[float]]
"""What is averaged at the next log, by name."""
PER_RANK_PARTS = ("rng", "log")
"""Parts of the state that differ between ranks, whatever the method."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The state that a trainer resumes from; by default the start of a run.

    Attributes:
        folder: Local folder of the checkpoint, None at the start of a run.
        digests: Part of the state → its digest when the checkpoint was captured.
        carried: Place at which the user's code keeps a value → its digest.
        left_out: Parts that a negative control has taken out of the folder: they are not compared.
        takeover: What a fork's recipe changes in its parent's state.
        ranks: How many ranks made the checkpoint.
        strategy: How they had split the state.
        is_reshaped: Whether another number of ranks made the checkpoint.
        skips: Steps that the run's guard has found, in order; those of the recipe are not among them.
    """

    folder: str | None = None
    digests: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    takeover: ForkOverrides | None = None
    ranks: int = 1
    strategy: str = "ddp"
    is_reshaped: bool = False
    skips: tuple[int, ...] = ()


class ChunkTrainer(Upstream):
    """Base of the mixins that stand before one of TRL's trainers.

    Attributes:
        recipe: The resolved recipe.
        ranks: This process among those that train together.
        watchdog: Its signs of life.
        resumption: What it resumes from.
        places: Yields the checkpoint of its step in each place to write it to, best first.
        restored_rng: Digest of the random state right after it was restored.
        guard: What it watches its steps for; None also where it is only tried out.
        skipped: Steps that were skipped so far.
        guard_window: Loss and gradient norm of the newest steps that the guard kept. Without a guard it stays as it was
            restored: a fork's parent may have one.
        figures: Loss and gradient norm of a step that is yet to be judged, with those of the other processes.
        weighs: Whether each row or token counts as much in a step and an evaluation, however they are cut into batches;
            else each batch does, as in runs whose `loss` has the format 1.
        weighed: What the newest batch of an evaluation counts, see `figure_weights`.
        counted_whole: Rows and tokens of a step or an evaluation, where it `has_likelihood`.
    """

    recipe: Recipe
    ranks: Ranks = Ranks()
    watchdog: Watchdog = Watchdog()
    resumption: Resumption = Resumption()
    places: Callable[[], Iterator[PendingCheckpoint]] = staticmethod(lambda: iter(()))
    restored_rng: str | None = None
    guard: Guard | None = None
    skipped: tuple[int, ...] = ()
    guard_window: tuple[tuple[float, float], ...] = ()
    figures: tuple[float, ...] = ()
    weighs: bool = False
    weighed: dict[str, float]
    counted_whole: tuple[float, float] = (0.0, 0.0)

    def begin_chunk(
        self,
        ranks: Ranks,
        watchdog: Watchdog,
        resumption: Resumption,
        places: Callable[[], Iterator[PendingCheckpoint]],
    ) -> None:
        """Sets all that a chunk alone knows, before its callbacks are made; see the attributes of the same names."""
        raise NotImplementedError

    def figure_weights(self, inputs: Any) -> dict[str, float]:
        """Returns how much a batch counts among those of an evaluation: its rows, or what else its figures are over.

        Args:
            inputs: The batch, as the loss is computed of it.

        Returns:
            The weight of the loss and other figures, by name; under `""` that of all the others.
        """
        from transformers.trainer_pt_utils import find_batch_size

        return {"": float(find_batch_size(inputs) or 1)}

    @property
    def has_likelihood(self) -> bool:
        """Whether part of a loss that is a mean over rows is one over tokens."""
        return False

    def likelihood_tokens(self, inputs: Any) -> int:
        """Returns the tokens of a batch that the part of a loss is a mean over, where it `has_likelihood`."""
        raise NotImplementedError

    def token_share(self, inputs: Any) -> float:
        """Returns the factor of such a part in a loss that then counts by rows: 1 where a batch is the whole."""
        if not (self.weighs and self.counted_whole[1]):
            return 1.0
        from transformers.trainer_pt_utils import find_batch_size

        rows, tokens = self.counted_whole
        return self.likelihood_tokens(inputs) * rows / (find_batch_size(inputs) * tokens)

    def enter_training(self, model: nn.Module) -> None:
        """Does what a pass begins with, which TRL logs by: an evaluation may have been before it."""
        model.train()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    @property
    def skips_step(self) -> bool:
        return False

    def skip_step(self, model: nn.Module, inputs: Any) -> None:
        """Does in a pass of a step that is skipped what later steps need."""

    def judge(self, figures: Sequence[Sequence[float]]) -> None:
        """Judges a step by what it has come to in each process, where that is not done yet.

        Raises:
            SkipError: the run is to skip it; in all ranks.
        """

    @property
    def per_rank_parts(self) -> tuple[str, ...]:
        """Parts of the state that differ between ranks."""
        if self.recipe.parallel.virtual_workers:
            return ()
        return (*PER_RANK_PARTS, "method") if self.recipe.training.spec.generates else PER_RANK_PARTS

    @property
    def writes_part(self) -> bool:
        """Whether this rank has a part of the checkpoint to write."""
        return self.ranks.is_first or not self.recipe.parallel.virtual_workers

    @property
    def windows(self) -> dict[str, Window]:
        """TRL's values to be averaged at the next log, by mode; its experimental trainers name them otherwise."""
        return getattr(self, "_metrics", None) or getattr(self, "_stored_metrics", {})

    def checkpoint_folder(self) -> str:
        """Returns where `Trainer` writes the checkpoint of the step it is at."""
        return os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")

    def method_state(self) -> StateDict:
        """Returns what the method keeps between steps that `Trainer` does not save."""
        return {}

    def load_method_state(self, saved: StateDict) -> None:
        """Restores what `method_state` returned."""

    def load_skipped(self, saved: tuple[int, ...]) -> None:
        self.skipped = saved

    def optimizer_state(self) -> StateDict:
        """Returns what the optimizer keeps between steps; of one that is split over ranks, this rank's part."""
        return dict(self.optimizer.state_dict())

    def bare_optimizer(self) -> torch.optim.Optimizer:
        """Returns torch's optimizer, without what Accelerate wraps it in."""
        return cast("torch.optim.Optimizer", getattr(self.optimizer, "optimizer", self.optimizer))

    def trained(self) -> list[list[torch.nn.Parameter]]:
        """Returns the weights that are trained, by group of the optimizer."""
        return [group["params"] for group in self.optimizer.param_groups if group["params"]]

    def num_parts(self) -> int:
        """Returns how many ranks of this machine write a part of the optimizer's state each."""
        return 1


@contextlib.contextmanager
def all_counted(accelerator: Any) -> Iterator[None]:
    """Has an accelerator gather what all processes have.

    At the end of a loader Accelerate cuts what it gathers to the rows left over, which a loader that resumes within the
    pass counts otherwise. It is for figures of which no row is there twice.
    """
    accelerator.gather_for_metrics = accelerator.gather
    try:
        yield
    finally:
        del accelerator.gather_for_metrics
