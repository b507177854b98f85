"""What the Kubeflow Pipelines backend tells of a run's inside: task details, and the Argo workflow they are from.

Named as stock Kubeflow 2.17 names them, which merges a retry strategy into every template: a node of type Retry around
each attempt, `WF(0).root(0).KEY(0).executor(0)`. The backend lists Argo's nodes under their display names with the ids
of their children; no message, no pod. Those are in the workflow, which only the API's first version gives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.kubeflow.run_status import node_id

STARTED, ENDED, UNSET = "2024-05-01T12:00:00Z", "2024-05-01T12:00:42Z", "1970-01-01T00:00:00Z"
OMITTED = "RUNTIME_STATE_UNSPECIFIED"
PHASES = {
    "SUCCEEDED": "Succeeded",
    "FAILED": "Failed",
    "RUNNING": "Running",
    "PENDING": "Pending",
    "SKIPPED": "Skipped",
    OMITTED: "Omitted",
}
WORKFLOW = "w-abc"
POD = "retry-system-container-impl"
Path = tuple[str, ...]


def task_states(spec: dict[str, Any], state: str, *, at: str | None, verdict: str) -> dict[Path, str]:
    """Return the state of each task of a run, by its key after those of the graphs around it.

    Args:
        spec: The compiled pipeline.
        state: The run's.
        at: The task at which a run fails, or where a running one is; by default the first.
        verdict: Name of the branch that is taken of several; a condition alone holds.
    """
    states: dict[Path, str] = {}
    if state != "PENDING":
        _walk(spec, spec["root"]["dag"], state, at, verdict, states, ())
    return states


def _walk(
    spec: dict[str, Any],
    dag: dict[str, Any],
    state: str,
    at: str | None,
    verdict: str,
    states: dict[Path, str],
    around: Path,
) -> None:
    tasks = dag["tasks"]
    left = dict(tasks)
    branches = [task["taskInfo"]["name"] for task in tasks.values() if "condition" in task.get("triggerPolicy", {})]
    skipped = {name for name in branches if len(branches) > 1 and name != verdict}
    while left:
        ready = [key for key in left if not set(left[key].get("dependentTasks", [])) & set(left)]
        for key in sorted(ready):
            task = left.pop(key)
            before = [states[(*around, name)] for name in task.get("dependentTasks", [])]
            place = (*around, key)
            states[place] = _state(key, task, state, at, before, skipped)
            inner = spec["components"][task["componentRef"]["name"]].get("dag")
            if inner and states[place] == "SUCCEEDED":
                _walk(spec, inner, state, at, verdict, states, place)
                inside = {states[path] for path in states if path[:-1] == place}
                states[place] = next((s for s in ("FAILED", "RUNNING") if s in inside), "SUCCEEDED")


def _state(key: str, task: dict[str, Any], state: str, at: str | None, before: list[str], skipped: set[str]) -> str:
    # What runs whatever came before it: the exit handler's task.
    goes_on = task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    if set(before) & ({"RUNNING", OMITTED} | (set() if goes_on else {"FAILED"})):
        return OMITTED
    if task["taskInfo"]["name"] in skipped:
        return "SKIPPED"
    here = at == key if at else not before
    if here and state in ("FAILED", "CANCELING"):
        return "FAILED"
    return "RUNNING" if here and state == "RUNNING" else "SUCCEEDED"


@dataclass(frozen=True)
class Node:
    """A node of the workflow."""

    name: str
    kind: str
    state: str
    children: tuple[str, ...] = ()
    key: str = ""
    """Key of the task whose pod it is."""

    @property
    def display_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def id(self) -> str:
        return WORKFLOW if self.name == WORKFLOW else node_id(WORKFLOW, self.name)


def _nodes(states: dict[Path, str]) -> Iterator[Node]:
    yield from _wrapped(WORKFLOW, "RUNNING", "DAG")
    yield from _wrapped(f"{WORKFLOW}(0).root", "RUNNING", "DAG")
    inner = {path[:-1] for path in states}
    for path, state in states.items():
        name = f"{WORKFLOW}(0).root(0).{'(0).'.join(path)}"
        if state in (OMITTED, "SKIPPED"):
            yield Node(name, "Skipped", state)
            continue
        yield from _wrapped(f"{name}-driver", "SUCCEEDED", "Pod")
        yield from _wrapped(name, state, "DAG", (f"{name}(0).executor",) if path not in inner else ())
        if path not in inner:
            yield from _wrapped(f"{name}(0).executor", state, "Pod", key=path[-1])


def _wrapped(name: str, state: str, kind: str, children: tuple[str, ...] = (), key: str = "") -> Iterator[Node]:
    """Yield a node and, around it, the one that would try again."""
    yield Node(name, "Retry", state, (node_id(WORKFLOW, f"{name}(0)"),))
    yield Node(f"{name}(0)", kind, state, tuple(node_id(WORKFLOW, child) for child in children), key)


def task_details(run_id: str, states: dict[Path, str]) -> list[dict[str, Any]]:
    """Return the API's list."""
    return [_detail(run_id, node) for node in _nodes(states)]


def _detail(run_id: str, node: Node) -> dict[str, Any]:
    ended = node.state in ("SUCCEEDED", "FAILED")
    return {
        "run_id": run_id,
        "task_id": hashlib.md5(node.name.encode()).hexdigest(),
        "display_name": node.display_name,
        "create_time": STARTED,
        "start_time": STARTED,
        "end_time": ENDED if ended else UNSET,
        **({} if node.state == OMITTED else {"state": node.state}),
        **({"child_tasks": [{"pod_name": child} for child in node.children]} if node.children else {}),
    }


def workflow(
    states: dict[Path, str], messages: dict[str, str], *, cancelled: bool, retry_strategy: dict[str, str] | None
) -> str:
    """Return the Argo workflow as the backend stores it: names, phases and messages of nodes."""
    nodes = {}
    for node in _nodes(states):
        is_told = node.kind == "Pod" and node.key in messages
        nodes[node.id] = {
            "id": node.id,
            "name": node.name,
            "displayName": node.display_name,
            "type": node.kind,
            "templateName": POD if node.kind == "Pod" else "system-container-executor",
            "phase": "Pending" if is_told and node.state == "RUNNING" else PHASES[node.state],
            "startedAt": STARTED,
            **({"message": messages[node.key]} if is_told else {}),
        }
    spec: dict[str, Any] = {"activeDeadlineSeconds": 0} if cancelled else {}
    spec["templateDefaults"] = {"retryStrategy": retry_strategy} if retry_strategy else {}
    return json.dumps({"metadata": {"name": WORKFLOW}, "spec": spec, "status": {"nodes": nodes}})


def pod_name(states: dict[Path, str], key: str) -> str:
    """Return the name of a task's pod: workflow, template and the hash at the end of the node's id."""
    (pod,) = [node for node in _nodes(states) if node.kind == "Pod" and node.key == key]
    return f"{WORKFLOW}-{POD}-{pod.id.rpartition('-')[2]}"
