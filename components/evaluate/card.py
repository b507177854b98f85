"""What evaluate leaves in Kubeflow: a run's figures, one column on the page that compares runs."""

from __future__ import annotations

from typing import Any

from baton.components.shared.checkpoints.store import CheckpointStore
from baton.components.shared.models import trained
from baton.components.shared.pages.cards import Card
from baton.components.shared.runs.documents.data import Tokens
from baton.components.shared.runs.run import Run

DIGEST = 16
"""Characters of the digest: as many as tell runs apart and fit into a column."""


def card(run: Run, evaluation: dict[str, Any]) -> Card:
    """Returns the figures of a run that is trained.

    Args:
        run: The run.
        evaluation: What `evaluate_run` returned.
    """
    chosen, last = trained.chosen_checkpoint(run), trained.final_checkpoint(run)
    work, origin = last.meta.work, last.meta.forked_from
    per_step = run.need(Tokens).tokens * run.plan().passes(1)
    own_steps = last.step - (origin.step if origin else 0)
    losses = CheckpointStore(run).evaluation_losses(chosen)
    peaks = [attempt.peak_bytes for attempt in run.attempts() if attempt.peak_bytes]
    figures = {
        f"{name}_{when}": value
        for name in evaluation["after"] | evaluation["before"]
        for when in ("before", "after")
        if (value := evaluation[when].get(name)) is not None
    }
    cost = {
        "eval_loss": losses[max(losses)] if losses else None,
        "steps": chosen.step,
        "tokens": round(per_step * chosen.step),
        "tokens_per_second": round(per_step * own_steps / work.trained_seconds, 1) if work.trained_seconds else None,
        "goodput": round(work.goodput, 4),
        "peak_memory_gib": round(max(peaks) / 2**30, 3) if peaks else None,
        "digest": chosen.digest[:DIGEST],
    }
    return Card("", figures | cost)
