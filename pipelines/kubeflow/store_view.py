"""What the store says of a run whose record on Kubeflow has stopped: which stages have left their record since."""

from __future__ import annotations

import re
from dataclasses import replace

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.outcome import Evaluation
from baton.components.shared.runs.documents.training import Progress
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run
from baton.components.shared.store.storage import Storage
from baton.pipelines.kubeflow import api, run_view
from baton.pipelines.kubeflow.endpoint import Client
from baton.pipelines.kubeflow.run_view import UNKNOWN, Stage, View


def explained(client: Client, remote: api.Run, stages: list[Stage]) -> View:
    """Returns what is known of a run: from Kubeflow, and where its record has stopped from the store.

    Args:
        client: What `endpoint.connect` returned.
        remote: The run as kfp's client returns it.
        stages: Its stages.
    """
    view = run_view.explained(client, remote, stages)
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
        except (BatonError, KeyError, ValueError):  # no such run, no access, or a pipeline that is none of ours
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
    recorded = run.recorded(remote.created_at)
    progress, plan, evaluation = run.read(Progress), run.read(Plan), run.read(Evaluation)
    verdict: dict[str, bool] = {}
    if remote.state == "SUCCEEDED" and evaluation and evaluation.gate:
        verdict = {"export": evaluation.gate.passed, "reject": not evaluation.gate.passed}
    seen = []
    for stage in stages:
        kind = stage.component_name
        index = int(number[1]) if (number := re.search(r" (\d+)$", stage.name)) else None
        if kind in verdict:
            seen.append(replace(stage, state="SUCCEEDED" if verdict[kind] else "SKIPPED"))
        elif (kind if index is None else f"{kind}-{index:03d}") in recorded:
            seen.append(replace(stage, state="SUCCEEDED", message="done, as the store says"))
        elif progress and plan and kind == "train-chunk" and progress.chunk == index:
            seen.append(replace(stage, message=f"step {progress.step} of {plan.num_steps} at {progress.at}"))
        else:
            seen.append(stage)
    return seen
