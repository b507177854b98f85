"""The guard: each step is judged before its checkpoint can be, and a step that is known to be bad is skipped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from baton.components.shared.core.errors import SkipError, UserError
from baton.components.train_chunk.trainer.base import ChunkTrainer, StateDict

if TYPE_CHECKING:
    from torch import nn

FEWEST = 10
"""Steps that a median is taken of at least, where so many are remembered."""
STATE = "guard"
"""Name of the window in the method's state."""


class Guarded(ChunkTrainer):
    """Mixin for a `Trainer`: judges each step by its loss and gradient norm, and skips those that are to be skipped.

    A skipped step is counted, and schedule, rows and callbacks advance as ever; nothing is computed, and the optimizer
    and its scaler do not know of it. What is found depends on the steps kept alone, so the window is state.
    """

    _kept: tuple[tuple[float, float], ...] = ()
    _loss: torch.Tensor | float = 0.0

    @property
    def skips_step(self) -> bool:
        """Whether the step that has begun is skipped."""
        step = self.state.global_step + 1
        return step in self.resumption.skips or bool(self.guard and step in self.guard.skip)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Makes a pass of a step, or passes over it."""
        if not self.skips_step:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            if self.guard:
                self._loss = self._loss + loss.float()
            return loss
        model.train()  # as a pass begins: an evaluation may have been before it, and TRL logs by it
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        self.pass_over(model, inputs)
        return torch.zeros((), device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> float:
        """Returns the operations of a pass."""
        return 0.0 if self.skips_step else float(super().floating_point_ops(inputs))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return None if self.skips_step else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> Any:
        """Returns the gradient norm of a step that may be taken over, None where it is skipped; see `_judge`."""
        if self.skips_step:
            self._skip()
            return None
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.guard:
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP's shards, that of all
            loss, size, self._loss = float(self._loss), 0.0 if whole is None else float(whole), 0.0
            if self.args.world_size > 1:
                self.figures = (loss, size)
            else:  # with virtual workers each process has the loss of all
                self._judge(self.state.global_step + 1, loss, size)
        return norm

    def judge(self, figures: Sequence[Sequence[float]]) -> None:
        """Judges a step of several processes: after its update, which goes with the process if need be.

        Before it each would have waited for the others once more.
        """
        if self.figures:
            self.figures = ()
            self._judge(self.state.global_step, sum(row[0] for row in figures) / len(figures), figures[0][1])

    def _skip(self) -> None:
        """Ends a step that was passed over: no update, and no part in the average that is logged."""
        # Accelerate's optimizer makes a step, by its scaler where it has one, only where gradients are synced.
        self.accelerator.gradient_state._set_sync_gradients(False)
        # Where the scaler refused the update before, and this process made it, the schedule would stand still.
        self.optimizer._is_overflow = False
        self._globalstep_last_logged += 1
        self.skipped = (*self.skipped, self.state.global_step + 1)

    def _judge(self, step: int, loss: float, norm: float) -> None:
        """Takes a step into the window.

        Raises:
            SkipError: it is out of bounds; in all ranks.
        """
        assert self.guard
        if math.isfinite(loss) and math.isfinite(norm):
            # The loss of a policy is about 0, and no multiple of it says anything.
            times = None if self.recipe.training.generation else self.guard.loss
            for at, (name, bound) in enumerate((("loss", times), ("grad_norm", self.guard.grad_norm))):
                before = [row[at] for row in self._kept]
                if bound and is_beyond((loss, norm)[at], before, bound, self.guard.window):
                    raise _error(step, name, loss, norm, bound, before)
            self._kept = (*self._kept, (loss, norm))[-self.guard.window :]
        # A norm that the gradients' scale has made infinite is for the scaler: it refuses the update, and lowers it.
        elif self.guard.nan and not (math.isfinite(loss) and self.accelerator.scaler is not None):
            text = f"step {step} has the loss {loss:g} and the gradient norm {norm:g}; expected finite ones."
            raise SkipError(text, step=step, reason="nan", loss=loss, grad_norm=norm)

    def method_state(self) -> StateDict:
        """Returns what the method keeps, and the window."""
        state = super().method_state()
        # Left out while it is empty: a fork may have another guard than its parent, or alone have one.
        return {**state, STATE: self._kept} if self._kept else state

    def load_method_state(self, saved: StateDict) -> None:
        """Restores it."""
        super().load_method_state(saved)
        self._kept = tuple(saved.get(STATE, ()))

    def load_skipped(self, saved: tuple[int, ...]) -> None:
        """Restores which steps were skipped.

        Raises:
            UserError: the recipe has others, which were trained.
        """
        trained = [x for x in (self.guard.skip if self.guard else ()) if x <= self.state.global_step and x not in saved]
        if trained:
            raise UserError(
                f"training.guard.skip has step {trained[0]}, which this run has trained: its newest checkpoint is that "
                f"of step {self.state.global_step}.",
                remedy="Leave it out, or start another run with the list.",
            )
        self.skipped = saved


def is_beyond(value: float, before: list[float], times: float, window: int) -> bool:
    """Tells whether a value is out of bounds.

    One that is not above all before it is not: where a loss has fallen fast, it may rise to where it was.

    Args:
        value: The value.
        before: Those of the steps kept before.
        times: How many times their median it may be.
        window: How many are remembered.
    """
    if len(before) < min(FEWEST, window) or value <= max(before):
        return False
    median = statistics.median(before)
    return 0 < median * times < value


def _error(step: int, name: str, loss: float, norm: float, bound: float, before: list[float]) -> SkipError:
    """Returns the error of a step whose loss or gradient norm is out of bounds."""
    median = statistics.median(before)
    what, value = ("loss", loss) if name == "loss" else ("gradient norm", norm)
    text = (
        f"step {step} has the {what} {value:.4g}; expected at most {bound:g} times {median:.4g}, the median of the "
        f"{len(before)} steps before it (training.guard.{name})."
    )
    return SkipError(text, step=step, reason=name, loss=loss, grad_norm=norm, median=median)
