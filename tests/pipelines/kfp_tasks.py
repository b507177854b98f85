"""What the Kubeflow Pipelines backend tells of a run's inside: task details, and the Argo workflow they are from.

The backend lists Argo's nodes under their display names: each task of the compiled pipeline, its driver, and a node
named `executor` for each pod; no message, no pod. Those are in the workflow, which only the API's first version gives.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

STARTED, ENDED, UNSET = "2024-05-01T12:00:00Z", "2024-05-01T12:00:42Z", "1970-01-01T00:00:00Z"
PHASES = {
    "SUCCEEDED": "Succeeded",
    "FAILED": "Failed",
    "RUNNING": "Running",
    "SKIPPED": "Skipped",
    "RUNTIME_STATE_UNSPECIFIED": "Omitted",
}


def task_states(spec: dict[str, Any], state: str, *, at: str | None, verdict: str) -> dict[str, str]:
    """Return the state of each task of a run.

    Args:
        spec: The compiled pipeline.
        state: The run's.
        at: The task at which a run fails, or where a running one is; by default the first.
        verdict: Name of the branch that a condition takes.
    """
    states: dict[str, str] = {}
    if state != "PENDING":
        _walk(spec, spec["root"]["dag"], state, at, verdict, states)
    return states


def _walk(
    spec: dict[str, Any], dag: dict[str, Any], state: str, at: str | None, verdict: str, states: dict[str, str]
) -> None:
    tasks = dag["tasks"]
    left = dict(tasks)
    while left:
        ready = [key for key in left if not set(left[key].get("dependentTasks", [])) & set(left)]
        for key in sorted(ready):
            task = left.pop(key)
            before = [states[name] for name in task.get("dependentTasks", [])]
            states[key] = _state(key, task, state, at, before, verdict)
            inner = spec["components"][task["componentRef"]["name"]].get("dag")
            if inner and states[key] == "SUCCEEDED":
                _walk(spec, inner, state, at, verdict, states)


def _state(key: str, task: dict[str, Any], state: str, at: str | None, before: list[str], verdict: str) -> str:
    if set(before) & {"FAILED", "RUNNING", "RUNTIME_STATE_UNSPECIFIED"}:
        return "RUNTIME_STATE_UNSPECIFIED"
    if "triggerPolicy" in task and task["taskInfo"]["name"] != verdict:
        return "SKIPPED"
    here = at == key if at else not before
    if here and state in ("FAILED", "CANCELING"):
        return "FAILED"
    return "RUNNING" if here and state == "RUNNING" else "SUCCEEDED"


def task_details(run_id: str, states: dict[str, str]) -> list[dict[str, Any]]:
    """Return the API's list: for each task also its driver and its pod."""
    details = [_detail(run_id, "root", "RUNNING"), _detail(run_id, "root-driver", "SUCCEEDED")]
    for key, state in states.items():
        details.append(_detail(run_id, key, state))
        if state != "RUNTIME_STATE_UNSPECIFIED":
            details += [_detail(run_id, f"{key}-driver", "SUCCEEDED"), _detail(run_id, "executor", state)]
    return details


def _detail(run_id: str, name: str, state: str) -> dict[str, Any]:
    ended = state in ("SUCCEEDED", "FAILED")
    return {
        "run_id": run_id,
        "task_id": hashlib.md5(name.encode()).hexdigest(),
        "display_name": name,
        "state": state,
        "create_time": STARTED,
        "start_time": STARTED,
        "end_time": ENDED if ended else UNSET,
    }


def workflow(states: dict[str, str], messages: dict[str, str], *, cancelled: bool) -> str:
    """Return the Argo workflow as the backend stores it: names, phases and messages of nodes."""
    nodes = {}
    for number, (key, state) in enumerate(states.items()):
        for name, kind, template in ((key, "DAG", "system-container-executor"), ("executor", "Pod", POD)):
            path = f"w-abc.root.{key}" + ("" if kind == "DAG" else ".executor")
            identifier = f"w-abc-{number}{len(name)}"
            nodes[identifier] = {
                "id": identifier,
                "name": path,
                "displayName": name,
                "type": kind,
                "templateName": template,
                "phase": "Pending" if kind == "Pod" and state == "RUNNING" and key in messages else PHASES[state],
                "startedAt": STARTED,
                **({"message": messages[key]} if kind == "Pod" and key in messages else {}),
            }
    spec = {"activeDeadlineSeconds": 0} if cancelled else {}
    return json.dumps({"metadata": {"name": "w-abc"}, "spec": spec, "status": {"nodes": nodes}})


POD = "retry-system-container-impl"


def pod_name(states: dict[str, str], key: str) -> str:
    """Return the name of a task's pod: workflow, template and the hash at the end of the node's id."""
    return f"w-abc-{POD}-{list(states).index(key)}{len('executor')}"
