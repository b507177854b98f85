"""Leaves with a run what it could not leave itself, as its pod was lost or it was cancelled: why, and a page.

It is the one who looks that does it (`status`, `--wait`, `cancel`, `retry`), and it needs the store. What the stage
itself has left, which knows better, stays.
"""

from __future__ import annotations

import datetime
import os

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs import failures
from baton.components.shared.runs.documents.outcome import Failure
from baton.components.shared.runs.run import Run, now
from baton.pipelines.kubeflow import api, store_view
from baton.pipelines.kubeflow.endpoint import Client
from baton.pipelines.kubeflow.run_view import ENDED, OWN, UNKNOWN, WAITING, Stage

PLACES = {
    "failed": ("FAILED", "CANCELED", UNKNOWN, "RUNNING", "PENDING", WAITING),
    "canceled": ("CANCELED", "RUNNING", "PENDING", "FAILED", UNKNOWN, WAITING),
}
"""How a run ended → state of the stage at which it did, the surest first."""
CANCELLED = "The run was cancelled."
UNSAID = "Its pod has left no message."


def leave_word(client: Client, remote: api.Run, stages: list[Stage], state: str) -> str | None:
    """Keeps why a run ended before its end, where it did and nobody has, and writes its page.

    Args:
        client: What `endpoint.connect` returned.
        remote: The run as kfp's client returns it.
        stages: Its stages, explained.
        state: What it came to, as `run_view.outcome` tells.

    Returns:
        What to say of it in one line; None where the run did not end like that, or is no single training.
    """
    if state not in PLACES or not stages:
        return None
    order = PLACES[state]
    stage = min(stages, key=lambda stage: order.index(stage.state) if stage.state in order else len(order))
    at = stage if stage.name != OWN else next((x for x in stages if x.state not in ENDED), stage)
    phase, name = at.name.rpartition(": ")[0], stage.name.rpartition(": ")[2]
    try:
        run = store_view.training_run(remote, client.specification(remote), phase)
        if run.storage.is_local and not os.path.isdir(run.storage.root):
            raise BatonError(f"{run.storage.root} is not a folder here.")
        if _has_word(run, remote):
            return f"why it ended: {run.uri}/report.html"
        if run.recorded(_end(remote, stages)):
            return None  # it has been resumed since, by another run on Kubeflow
        return f"why it ended: {failures.leave(run.uri, _failure(stage, name, remote, state), anew=True)}"
    except (KeyError, ValueError):  # a sweep, a retraining, or no pipeline of ours
        return None
    except BatonError as error:
        return f"no page says why it ended, as its store cannot be used from here: {error.message}"


def _has_word(run: Run, remote: api.Run) -> bool:
    failure = run.read(Failure)
    return failure is not None and store_view.is_of(failure, remote)


def _end(remote: api.Run, stages: list[Stage]) -> datetime.datetime:
    ends = [stage.ended for stage in stages if stage.ended]
    return remote.finished_at or max(ends, default=None) or datetime.datetime.now(datetime.UTC)


def _failure(stage: Stage, name: str, remote: api.Run, state: str) -> Failure:
    again = f"`baton retry {remote.display_name}` resumes it."
    if state == "canceled":
        return Failure(stage=name, message=CANCELLED, remedy=again, is_cancelled=True, at=now())
    message, remedy = stage.message or UNSAID, stage.hint or again
    return Failure(stage=name, message=message, remedy=remedy, exit_code=stage.exit_code, at=now())
