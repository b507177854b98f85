"""What the store says of a run: which stages have left their record since Kubeflow's stopped, and their last words."""

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
from baton.pipelines.kubeflow.run_view import UNKNOWN, WAITING, Stage, View

PATIENCE_S = 3.0
"""Seconds for which a store that does not answer is asked: somebody waits."""


def explained(client: Client, remote: api.Run, stages: list[Stage]) -> View:
    """Returns what is known of a run: from Kubeflow, and where its record has stopped from the store.

    Args:
        client: What `endpoint.connect` returned.
        remote: The run as kfp's client returns it.
        stages: Its stages.
    """
    view, specification = run_view.explained(client, remote, stages), client.specification(remote)
    if view.is_frozen:
        return _completed(view, remote, specification)
    return replace(view, stages=[_in_its_own_words(stage, remote, specification) for stage in view.stages])


def _in_its_own_words(stage: Stage, remote: api.Run, specification: api.PostedSpec) -> Stage:
    """Returns a stage that has left Kubernetes no word with those that it has left in the store, where it has."""
    if stage.state != "FAILED" or not str(stage.hint).startswith(run_view.LAUNCHER):
        return stage
    phase, _, name = stage.name.rpartition(": ")
    try:
        failure = training_run(remote, specification, phase).read(Failure)
    except (BatonError, KeyError, ValueError):  # no access, or a pipeline of several runs
        return stage
    if failure is None or failure.stage != name or failure.exit_code is None or not is_of(failure, remote, stage):
        return stage
    return replace(stage, message=failure.message, exit_code=failure.exit_code, hint=None, is_lost=False)


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
    stages = [known.get(stage.path, stage) for stage in view.stages]
    if any(stage.message or stage.state != UNKNOWN for stage in known.values()):
        stages = _in_order(stages)
    return replace(view, stages=stages)


def _in_order(stages: list[Stage]) -> list[Stage]:
    """Returns stages of which some are unknown with what their order tells.

    What comes before a stage that has begun has ended; what comes after one that has not ended waits.
    """
    before = {stage.path: stage.after for stage in stages}
    begun = [stage.path for stage in stages if stage.state in ("SUCCEEDED", "FAILED") or stage.message]
    ended = {stage.path for stage in stages if stage.state in run_view.ENDED}
    while begun:
        new = before.get(begun.pop(), frozenset()) - ended
        ended |= new
        begun += new
    told = []
    for stage in stages:
        may_be_left_out = any(parent.startswith("condition-") for parent in stage.parents)
        if stage.state == UNKNOWN and stage.path in ended and not may_be_left_out:
            stage = replace(stage, state="SUCCEEDED", message="done, as what follows has begun")
        elif stage.state == UNKNOWN and stage.path not in ended and not stage.after <= ended:
            stage = replace(stage, state=WAITING, message=None)
        told.append(stage)
    return told


def is_of(failure: Failure, remote: api.Run, stage: Stage | None = None) -> bool:
    """Returns whether it is this run on Kubeflow that has failed, and this attempt at a stage, and none before it."""
    since = (stage and stage.started) or remote.created_at
    return bool(failure.at) and datetime.datetime.fromisoformat(failure.at) >= since


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
