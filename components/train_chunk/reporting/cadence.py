"""Evaluations so many times in each epoch, which `Trainer` has no word for."""

from __future__ import annotations

from transformers import TrainerCallback, TrainerControl, TrainerState

from baton.components.shared.runs.plan import Plan


class EvaluationsPerEpoch(TrainerCallback):
    """Asks for the evaluations that fall between the ends of epochs.

    Args:
        plan: The run's plan.
        per_epoch: Evaluations in each epoch.
    """

    stateless = True

    def __init__(self, plan: Plan, per_epoch: int) -> None:
        self._plan = plan
        self._per_epoch = per_epoch

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Asks for one where the plan's rule says so."""
        control.should_evaluate = control.should_evaluate or self._plan.is_due(state.global_step, self._per_epoch)
