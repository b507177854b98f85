"""Baton's runs of a Kubeflow namespace at a glance: state, progress, time left, and the reason where one waits."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError
from baton.kubeflow import run_status, submit
from baton.kubeflow.connection import KubeflowClient, KubeflowRun
from baton.kubeflow.run_status import GOING_ON, RunStatus
from baton.local import results
from baton.pages import html
from baton.runs.documents import Progress

MOST_RUNS = 200  # of the namespace's newest, whoever's they are


@dataclass(frozen=True)
class RunRow:
    """A run on Kubeflow, with figures where its store can be read from here."""

    run: str
    run_id: str
    url: str
    state: str
    created: str
    starts: int  # of Kubeflow's run: one more than its retries
    stage: str | None = None  # that runs, waits or failed
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    seconds_left: float | None = None  # of training, while it trains
    waits: str | None = None  # reason why a stage does not start

    @property
    def steps(self) -> str:
        if self.step is None:
            return ""
        return f"{self.step:,} of {self.num_steps:,}" if self.num_steps else f"{self.step:,}"


def rows(client: KubeflowClient, endpoint: str, namespace: str | None, count: int) -> Iterator[RunRow]:
    """Yields Baton's newest runs of a namespace, `count` at most, without those that are archived.

    Raises:
        BatonError: the endpoint fails.
    """
    unreachable: set[str | None] = set()
    for listed in client.runs_of(namespace, MOST_RUNS):
        if count <= 0:
            return
        if listed.is_archived or not run_status.is_batons(client.specification(listed)):
            continue
        count -= 1
        run = client.get_run(listed.run_id)  # the list lacks the stages
        stages = run_status.stages(client, run)
        is_done = run.state == "SUCCEEDED"
        view = RunStatus(stages) if is_done else run_status.explained_by_store(client, run, stages)
        yield _row(client, endpoint, run, view, unreachable)


def render(rows: list[RunRow], title: str) -> str:
    """Returns the page that lists runs."""
    environment = html.environment(Path(html.__file__).parent)
    return environment.get_template("namespace.html.j2").render(rows=rows, title=title)


def _row(
    client: KubeflowClient, endpoint: str, run: KubeflowRun, view: RunStatus, unreachable: set[str | None]
) -> RunRow:
    order = ("FAILED", "PENDING", "RUNNING")
    at = min((x for x in view.stages if x.state in order), key=lambda x: order.index(x.state), default=None)
    waiting = [stage for stage in view.stages if stage.state in GOING_ON and stage.hint]
    has_ended = run.state in submit.FINAL_STATES
    figures: results.Status | None = None
    left: float | None = None
    specification = client.specification(run)
    phase = at.name.rpartition(": ")[0] if at else ""
    store: str | None = None
    with contextlib.suppress(KeyError, ValueError):  # a sweep or a retraining
        try:
            store = run_status.store_of(run, specification)
            if store not in unreachable:
                training = run_status.training_run(run, specification, phase)
                figures, progress = results.status(training), training.read(Progress)
                if progress and progress.seconds_per_step and figures["num_steps"] and not has_ended:
                    left = (figures["num_steps"] - figures["step"]) * progress.seconds_per_step
        except BatonError:
            unreachable.add(store)
    return RunRow(
        run=run.display_name,
        run_id=run.run_id,
        url=submit.run_url(endpoint, run.run_id),
        state=run_status.outcome(run.state, view.stages),
        created=run.created_at.astimezone(datetime.UTC).isoformat(timespec="seconds"),
        starts=max(1, run.num_ends + (not has_ended)),
        stage=at.name if at else None,
        step=figures["step"] if figures else None,
        num_steps=figures["num_steps"] if figures else None,
        loss=figures["loss"] if figures else None,
        seconds_left=left,
        waits="; ".join(f"{stage.name}: {stage.message}" for stage in waiting) or None,
    )
