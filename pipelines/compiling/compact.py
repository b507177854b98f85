"""Names the tasks of a compiled pipeline, and writes what it says several times once.

Kubeflow's page finds tasks by their ids over all graphs of a run, and turns components into parameters of a workflow
that Kubernetes limits to 1 MiB.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

Spec = dict[str, Any]
"""A part of a compiled file, as YAML has it."""
CONTROL = ("condition-", "for-loop-", "exit-handler-")
"""How the ids of the graphs begin that kfp makes of conditions, loops and exit handlers."""


def name_tasks(spec: Spec) -> None:
    """Gives each task an id that no other graph of the pipeline holds; names on the page stay.

    An id is the component's name, with the number of the chunk from the second on: `train-chunk-17`. The tasks of a
    phase, of a later bracket and of a sweep's winner begin with its name: `two-evaluate`. What kfp makes of conditions,
    loops and exit handlers ends with it, as Kubeflow tells them by how their ids begin.

    Args:
        spec: The pipeline's specification, which is changed.
    """
    components: Spec = spec["components"]
    taken: set[str] = set()

    def name(graph: Spec, phase: str) -> None:
        tasks: Spec = graph["tasks"]
        ids: dict[str, str] = {}
        for key in sorted(tasks, key=_natural):
            inside = components[tasks[key]["componentRef"]["name"]].get("dag")
            ids[key] = next(each for each in _wanted(key, tasks[key], phase, inside) if each not in taken)
            taken.add(ids[key])
        graph["tasks"] = {ids[key]: task for key, task in tasks.items()}
        _refer(graph, ids)
        for task in graph["tasks"].values():
            component = components[task["componentRef"]["name"]]
            if inside := component.get("dag"):
                begins = "start_from" in component.get("inputDefinitions", {}).get("parameters", {})
                name(inside, task["taskInfo"]["name"] if begins else phase)

    name(spec["root"]["dag"], "")


def _wanted(key: str, task: Spec, phase: str, inside: Spec | None) -> Iterator[str]:
    """Yields the ids that a task may have, the best first."""
    if inside is not None:
        yield "-".join(filter(None, (key, phase) if key.startswith(CONTROL) else (phase, key)))
    else:
        around, _, shown = str(task["taskInfo"]["name"]).rpartition(": ")
        own = "-".join(filter(None, (phase, around.replace(" ", "-"), re.sub(r"-\d+$", "", key))))
        number = re.search(r" (\d+)$", shown)
        if number is None:
            yield own
            own += key.removeprefix(re.sub(r"-\d+$", "", key))
        elif int(number[1]) > 1:
            own += f"-{number[1]}"
        yield own
        key = own
    yield f"{key}-again"
    yield from (f"{key}-again-{count}" for count in itertools.count(2))


def _refer(node: object, ids: dict[str, str]) -> None:
    """Puts the ids of a graph's tasks in place of their former ones, wherever the graph refers to a task."""
    if isinstance(node, list):
        for entry in node:
            _refer(entry, ids)
    elif isinstance(node, dict):
        for key, entry in node.items():
            if key in ("producerTask", "producerSubtask"):
                node[key] = ids[entry]
            elif key == "dependentTasks":
                node[key] = sorted(ids[name] for name in entry)
            elif key != "constant":
                _refer(entry, ids)


def merge_identical(spec: Spec, platform: Spec | None) -> None:
    """Gives tasks with identical components one component, and components with identical containers one container.

    Options of the cache that say nothing are left out.

    Args:
        spec: The pipeline's specification, which is changed.
        platform: What Kubernetes is told of each container, changed too; None where there is nothing.
    """
    executors: Spec = spec["deploymentSpec"]["executors"]
    settings: Spec = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if platform else {}
    kept = _merged(executors, lambda label: [executors[label], settings.get(label)])
    for label in set(settings) - set(executors):
        del settings[label]
    components: Spec = spec["components"]
    for graph in (spec["root"], *components.values()):
        for task in graph.get("dag", {}).get("tasks", {}).values():
            if not task.get("cachingOptions"):  # none is the same, and each task is in the workflow several times
                task.pop("cachingOptions", None)
    for component in components.values():
        if "executorLabel" in component:
            component["executorLabel"] = kept[component["executorLabel"]]
    while True:  # a graph is another one's equal once what lies in it is
        before = len(components)
        kept = _merged(components, components.__getitem__)
        for graph in (spec["root"], *components.values()):
            for task in graph.get("dag", {}).get("tasks", {}).values():
                name = task["componentRef"]["name"]
                task["componentRef"]["name"] = kept.get(name, name)
        if len(components) == before:
            return


def _merged(entries: Spec, content: Callable[[str], object]) -> dict[str, str]:
    """Removes all but the first of entries with the same content, and returns which one stands for each."""
    first: dict[str, str] = {}
    kept = {}
    for name in sorted(entries, key=_natural):
        kept[name] = first.setdefault(json.dumps(content(name), sort_keys=True), name)
    for name, stands in kept.items():
        if stands != name:
            del entries[name]
    return kept


def _natural(name: str) -> list[int]:
    """Returns what sorts `train-chunk-10` after `train-chunk-9`, and both after `train-chunk`."""
    return [int(part) for part in re.findall(r"\d+", name)] or [0]
