"""Which task of the compiled pipeline a node of the Argo workflow, or an entry of the API's list, belongs to.

A node is named by its path: `WF.root.GROUP.TASK.executor`, where the installation merges a retry strategy into every
template (stock Kubeflow 2.17 does) with the number of each attempt, `WF(0).root(0).GROUP(0).TASK(0).executor(0)`. The
API lists the nodes by the last part of that alone. Keys repeat in graphs inside a pipeline; which entry is whose is
then told by the ids of its children, which Argo makes of their paths.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from baton.pipelines.kubeflow.api import Node, TaskDetail

PODS = frozenset({"Pod", "Container", "HTTP", "Plugin"})
"""Types of the nodes that run something; the others hold nodes together."""
TELLING = ("FAILED", "CANCELED", "PENDING", "RUNNING", "SUCCEEDED", "SKIPPED")
"""States of the turns of a loop; the first that one of them is in stands for all."""
ATTEMPTS = range(3)
"""Numbers of attempts that a path is looked for with; stock Kubeflow makes three at most."""


def node_id(workflow: str, name: str) -> str:
    """Returns the id of a node: its workflow's name and the 32-bit FNV-1a hash of its own, as Argo's `NodeID` does."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = (value ^ byte) * 0x01000193 % 2**32
    return f"{workflow}-{value}"


def path(name: str) -> list[str]:
    """Returns the parts of a node's name, without the numbers of attempts."""
    return re.sub(r"\([\d:]+\)", "", name).split(".")


class Tasks:
    """The tasks of a pipeline, found again among the nodes of one of its runs.

    Args:
        places: Key of each task and the keys of the graphs around it, outermost first.
        details: What the API lists.
    """

    def __init__(self, places: Iterable[tuple[str, tuple[str, ...]]], details: Sequence[TaskDetail]) -> None:
        count = Counter(key for key, _ in places)
        self._repeated = {key for key in count if count[key] > 1}
        self._details: dict[str, list[TaskDetail]] = {}
        for detail in details:
            self._details.setdefault(detail.display_name or "", []).append(detail)
        ids = (child.pod_name for detail in details for child in detail.child_tasks or () if child.pod_name)
        self._workflow = next((identifier.rpartition("-")[0] for identifier in ids), "")

    def detail(self, key: str, parents: tuple[str, ...]) -> TaskDetail | None:
        """Returns the entry of a task, None where it has none yet."""
        candidates = self._details.get(key, ())
        if key.removesuffix("-driver") not in self._repeated:  # several are the turns of a loop
            return min(candidates, key=_rank, default=None)
        ids = set(self._ids_inside(key, parents))
        return next((x for x in candidates if any(child.pod_name in ids for child in x.child_tasks or ())), None)

    def _ids_inside(self, key: str, parents: tuple[str, ...]) -> Iterator[str]:
        """Yields the ids that the first node inside a task may have."""
        parts = (self._workflow, "root", *parents, key)
        yield node_id(self._workflow, ".".join((*parts, "executor")))
        for numbers in itertools.product(ATTEMPTS, repeat=len(parts)):
            name = ".".join(f"{part}({number})" for part, number in zip(parts, numbers, strict=True))
            yield node_id(self._workflow, name)

    def pods(self, key: str, parents: tuple[str, ...], nodes: Iterable[Node]) -> list[Node]:
        """Returns the pods of a task, its driver's and those of earlier attempts among them, in their order.

        Where Kubeflow's cache had the answer, the node in the place of the pod is one that was skipped.
        """
        own = [node for node in nodes if self._is_of(node, key, parents)]
        return sorted(own, key=lambda node: node.get("startedAt") or "")

    def _is_of(self, node: Node, key: str, parents: tuple[str, ...]) -> bool:
        is_task = node.get("type") == "Skipped" and node.get("displayName") == "executor"
        if node.get("type") not in PODS and not is_task:
            return False
        parts = path(node["name"])
        if key not in self._repeated:  # the graph of an exit handler has a name that the specification does not know
            return key in parts or f"{key}-driver" in parts
        return parts[2:] in ([*parents, key, "executor"], [*parents, f"{key}-driver"])


def _rank(detail: TaskDetail) -> int:
    return TELLING.index(detail.state) if detail.state in TELLING else len(TELLING)
