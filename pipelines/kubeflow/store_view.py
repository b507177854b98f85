"""What the store says of a run whose record on Kubeflow has stopped: which stages have left their record since."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.documents.outcome import Evaluation, Failure
from baton.components.shared.runs.documents.training import Progress
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run, chosen_name
from baton.components.shared.store.storage import Storage
from baton.pipelines.kubeflow import api, run_view
from baton.pipelines.kubeflow.endpoint import Client
from baton.pipelines.kubeflow.run_view import UNKNOWN, Stage, View

PATIENCE_S = 3.0
"""Seconds for which a store that does not answer is asked: somebody waits."""


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
    return _completed(view, remote, client.specification(remote))


def _completed(view: View, remote: api.Run, specification: api.PostedSpec) -> View:
    """Returns the run with the stages that are unknown as the store has them; unchanged where it cannot be asked.

    A record counts where it is younger than the run on Kubeflow: the same training run may have had one before.
    """
    told: dict[str, list[Stage]] = {}
    for stage in view.stages:
        if stage.state == UNKNOWN:
            told.setdefault(stage.name.rpartition(": ")[0], []).append(stage)
    known: dict[tuple[str, ...], Stage] = {}
    for phase, unknown in told.items():
        try:
            run = training_run(remote, specification, phase)
            seen = _asked(unknown, run, remote)
            is_there = run.read(RunHead) is not None
        except (BatonError, KeyError, ValueError):  # no access, or a pipeline that is none of ours
            continue
        known |= {stage.path: stage for stage in seen}
        view = replace(view, has_no_word=view.has_no_word or (is_there and all(x.exit_code is None for x in seen)))
    return replace(view, stages=[known.get(stage.path, stage) for stage in view.stages])


def is_of(failure: Failure, remote: api.Run) -> bool:
    """Returns whether it is this run on Kubeflow that has failed, and none of the same name before it."""
    return bool(failure.at) and datetime.datetime.fromisoformat(failure.at) >= remote.created_at


def training_run(remote: api.Run, specification: api.PostedSpec, phase: str) -> Run:
    """Returns the training run of a phase, as the data split names it.

    Raises:
        KeyError: the pipeline is none that trains one run, or several in phases.
    """
    spec = specification.get("pipeline_spec", specification)
    inputs = spec["root"]["inputDefinitions"]["parameters"]
    given = (remote.runtime_config and remote.runtime_config.parameters) or {}
    named = str(given.get("run_name", inputs["run_name"].get("defaultValue", "")))
    name = chosen_name(named, spec["pipelineInfo"]["name"], remote.run_id, phase)
    store = str(given.get("store") or inputs["store"]["defaultValue"])
    return Run(Storage(store, patience=PATIENCE_S), name)


def _asked(stages: list[Stage], run: Run, remote: api.Run) -> list[Stage]:
    recorded = run.recorded(remote.created_at)
    progress, plan, evaluation = run.read(Progress), run.read(Plan), run.read(Evaluation)
    failure = run.read(Failure)
    failed = failure.stage if failure and failure.exit_code is not None and is_of(failure, remote) else None
    verdict: dict[str, bool] = {}
    if remote.state == "SUCCEEDED" and evaluation and evaluation.gate:
        verdict = {"export": evaluation.gate.passed, "reject": not evaluation.gate.passed}
    seen = []
    for stage in stages:
        kind = stage.component_name
        index = int(number[1]) if (number := re.search(r" (\d+)$", stage.name)) else None
        if failure and failed == stage.name.rpartition(": ")[2]:
            seen.append(replace(stage, state="FAILED", message=failure.message, exit_code=failure.exit_code))
        elif kind in verdict:
            seen.append(replace(stage, state="SUCCEEDED" if verdict[kind] else "SKIPPED"))
        elif (kind if index is None else f"{kind}-{index:03d}") in recorded:
            seen.append(replace(stage, state="SUCCEEDED", message="done, as the store says"))
        elif progress and plan and kind == "train-chunk" and progress.chunk == index:
            seen.append(replace(stage, message=f"step {progress.step} of {plan.num_steps} at {progress.at}"))
        else:
            seen.append(stage)
    return seen
