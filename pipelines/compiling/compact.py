"""Writes what a compiled pipeline says several times once: a chunk's component and container are every chunk's.

Kubeflow turns components into parameters of a workflow that Kubernetes limits to 1 MiB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Spec = dict[str, Any]
"""A part of a compiled file, as YAML has it."""


def merge_identical(spec: Spec, platform: Spec | None) -> None:
    """Gives tasks with identical components one component, and components with identical containers one container.

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
    for name in sorted(entries, key=lambda name: [int(part) for part in re.findall(r"\d+", name)] or [0]):
        kept[name] = first.setdefault(json.dumps(content(name), sort_keys=True), name)
    for name, stands in kept.items():
        if stands != name:
            del entries[name]
    return kept
