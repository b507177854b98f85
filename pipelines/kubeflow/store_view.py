"""What the store says of a run whose record on Kubeflow has stopped: which stages have left their record since."""

from __future__ import annotations

import re
from dataclasses import replace

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.outcome import Evaluation
from baton.components.shared.runs.documents.training import Progress, StageRecord
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run
from baton.components.shared.store.storage import Storage
from baton.pipelines.kubeflow import api, run_view
from baton.pipelines.kubeflow.endpoint import Client
from baton.pipelines.kubeflow.run_view import UNKNOWN, Stage, View


def explained(client: Client, remote: api.Run) -> View:
    """Returns what is known of a run: from Kubeflow, and where its record has stopped from the store.

    Args:
        client: What `endpoint.connect` returned.
        remote: The run as kfp's client returns it.
    """
    view = run_view.explained(client, remote, run_view.stages(client, remote))
    if not view.is_frozen:
        return view
    return replace(view, stages=_completed(view.stages, remote, client.specification(remote)))


def _completed(stages: list[Stage], remote: api.Run, specification: api.PostedSpec) -> list[Stage]:
    """Returns the stages, those that are unknown as the store has them; unchanged where it cannot be asked.

    A record counts where it is younger than the run on Kubeflow: the same training run may have had one before.
    """
    told: dict[str, list[Stage]] = {}
    for stage in stages:
        if stage.state == UNKNOWN:
            told.setdefault(stage.name.rpartition(": ")[0], []).append(stage)
    known: dict[tuple[str, ...], Stage] = {}
    for phase, unknown in told.items():
        try:
            known |= {stage.path: stage for stage in _asked(unknown, _run(remote, specification, phase), remote)}
        except (BatonError, KeyError):  # no such run, no access, or a pipeline that is none of ours
            continue
    return [known.get(stage.path, stage) for stage in stages]


def _run(remote: api.Run, specification: api.PostedSpec, phase: str) -> Run:
    """Returns the training run of a phase, as the data split names it."""
    spec = specification.get("pipeline_spec", specification)
    inputs = spec["root"]["inputDefinitions"]["parameters"]
    given = (remote.runtime_config and remote.runtime_config.parameters) or {}
    name = str(given.get("run_name") or f"{spec['pipelineInfo']['name']}-{remote.run_id}")
    store = str(given.get("store") or inputs["store"]["defaultValue"])
    return Run(Storage(store), f"{name}-{phase}" if phase else name)


def _asked(stages: list[Stage], run: Run, remote: api.Run) -> list[Stage]:
    since = remote.created_at.strftime("%Y-%m-%dT%H:%M:%S")
    left = {(record.kind, record.chunk): record for record in run.records() if record.at >= since}
    progress, plan = run.read(Progress), run.read(Plan)
    verdict: dict[str, bool] = {}
    if remote.state == "SUCCEEDED" and (gate := run.need(Evaluation).gate):
        verdict = {"export": gate.passed, "reject": not gate.passed}
    seen = []
    for stage in stages:
        index = int(number[1]) if (number := re.search(r" (\d+)$", stage.name)) else None
        record: StageRecord | None = left.get((stage.component_name, index))
        if stage.component_name in verdict:
            seen.append(replace(stage, state="SUCCEEDED" if verdict[stage.component_name] else "SKIPPED"))
        elif record:
            seen.append(replace(stage, state="SUCCEEDED", message=f"done at {record.at}, as the store says"))
        elif progress and plan and stage.component_name == "train-chunk" and progress.chunk == index:
            seen.append(replace(stage, message=f"step {progress.step} of {plan.num_steps} at {progress.at}"))
        else:
            seen.append(stage)
    return seen
