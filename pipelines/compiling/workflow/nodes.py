"""The nodes of a workflow's status once every stage has ended: what Argo keeps of each step.

A stage has six: a retry, a DAG and a pod for its executor, a retry and a pod for its driver, and a retry around the
executor's pod. Each carries its inputs as text, so that the patch of the pod (the whole container with what it is
called with) is there six times, the component, its container and its Kubernetes settings twice.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline_pb2

from baton.pipelines.compiling.workflow.documents import (
    Compiled,
    Dag,
    Json,
    as_json,
    dumps,
    pod_metadata,
    retries,
    size_of,
    template_prefix,
)
from baton.pipelines.compiling.workflow.pod import Assumed, Call, pod_patch

Task: TypeAlias = pipeline_pb2.PipelineTaskSpec

CONDITION_BRANCHES = "condition-branches-"
"""How Kubeflow names the box around an If and its Else, of which one runs."""

MAX_NODES = 5_000
"""Nodes beyond which no further iteration of a loop is worked out: they fit no workflow."""


@dataclass(frozen=True)
class Node:
    """One node of the status."""

    stage: str
    """The task whose node it is, with the names of the groups it lies in."""
    content: Mapping[str, Json]

    @property
    def identifier(self) -> str:
        """Its id, which is its key in the status."""
        return str(self.content["id"])

    @property
    def size(self) -> int:
        """Bytes of the node in the status, with its key."""
        return size_of(self.content) + size_of(self.identifier) + 2

    @property
    def is_stage(self) -> bool:
        """Whether it is the pod of a stage's executor."""
        return self.content["type"] == "Pod" and str(self.content["templateName"]).endswith("system-container-impl")


@dataclass(frozen=True)
class _Writer:
    """Writes the nodes of one workflow."""

    compiled: Compiled
    assumed: Assumed
    texts: Mapping[str, str]
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def workflow(self) -> str:
        return f"{self.compiled.name}-abcde"

    def node(self, stage: str, name: str, kind: str, template: str, **rest: Json) -> Node:
        """Returns a node with what every node has. Its id is a number that looks as random as Argo's."""
        pod: dict[str, Json] = {"hostNodeName": "localhost", "taskResultSynced": True} if kind == "Pod" else {}
        again: dict[str, Json] = {"nodeFlag": {"retried": True}} if name.endswith(")") else {}
        self.counted["nodes"] += 1
        arbitrary = zlib.crc32(name.encode())
        minute, second = divmod(arbitrary % 3600, 60)
        content: dict[str, Json] = {
            "id": self.id_of(name),
            "name": name,
            "displayName": name.rpartition(".")[2],
            "type": kind,
            "templateName": template,
            "templateScope": f"local/{self.workflow}",
            "phase": "Succeeded",
            "boundaryID": self.id_of(name.rpartition(".")[0]),
            "startedAt": f"2026-01-01T01:{minute:02}:{second:02}Z",
            "finishedAt": f"2026-01-01T02:{second:02}:{minute:02}Z",
            "progress": f"{second + 10}/{second + 10}",
            "resourcesDuration": {"cpu": arbitrary % 97, "memory": arbitrary % 971},
            **again,
            **rest,
            **pod,
        }
        return Node(stage, content)

    def id_of(self, name: str) -> str:
        """Returns a node's id as Argo forms it: the FNV-1a hash of its name. They decide its place in the JSON."""
        digest = 2_166_136_261
        for byte in name.encode():
            digest = (digest ^ byte) * 16_777_619 % 2**32
        return f"{self.workflow}-{digest}"

    def pair(self, stage: str, name: str, template: str, after: list[str], **rest: Json) -> Iterator[Node]:
        """Yields a pod with the retry around it."""
        yield self.node(stage, name, "Retry", template, children=[self.id_of(f"{name}(0)")], **rest)
        yield self.node(stage, f"{name}(0)", "Pod", template, children=[self.id_of(item) for item in after], **rest)

    def box(
        self, stage: str, name: str, template: str, children: list[str], rest: Mapping[str, Json]
    ) -> Iterator[Node]:
        """Yields a DAG with the retry around it."""
        ids: list[Json] = [self.id_of(child) for child in children]
        yield self.node(stage, name, "Retry", template, children=[self.id_of(f"{name}(0)")], **rest)
        ends = [self.id_of(f"{name}(0).executor(0)")]
        yield self.node(stage, f"{name}(0)", "DAG", template, children=ids, outboundNodes=ends, **rest)

    def dag(self, dag: Dag, place: str, path: str, values: Mapping[str, Json]) -> Iterator[Node]:
        """Yields the nodes of a graph's tasks; of the branches of a condition the one with most of them."""
        following = {name: [task for task in sorted(dag) if name in dag[task].dependent_tasks] for name in dag}
        branches: list[tuple[int, list[Node], list[Node]]] = []
        for name, task in sorted(dag.items()):
            made = list(self.task(name, task, place, path, values, [f"{place}.{x}-driver" for x in following[name]]))
            if not path.rpartition("/")[2].startswith(CONDITION_BRANCHES):
                yield from made
                continue
            skipped = self.node(path, f"{place}.{name}", "Skipped", task.component_ref.name)
            branches.append((sum(node.size for node in made), made, [*made[:2], skipped]))
        largest = max((size for size, _, _ in branches), default=0)
        for size, made, skipped_nodes in branches:
            yield from made if size == largest else skipped_nodes

    def task(
        self, name: str, task: Task, place: str, path: str, values: Mapping[str, Json], after: list[str]
    ) -> Iterator[Node]:
        """Yields the nodes of a task and of all that is in it."""
        component = self.compiled.component(task)
        stage = f"{path}/{name}" if path else name
        if component.executor_label:
            yield from self.stage(name, task, f"{place}.{name}", stage, values, after)
        elif task.HasField("parameter_iterator") or task.HasField("artifact_iterator"):
            yield from self.loop(name, task, f"{place}.{name}", stage)
        else:
            yield from self.group(name, task, f"{place}.{name}", stage, component.dag.tasks)

    def stage(
        self, name: str, task: Task, place: str, stage: str, values: Mapping[str, Json], after: list[str]
    ) -> Iterator[Node]:
        """Yields the six nodes of a stage."""
        component = self.compiled.component(task)
        container = dumps(as_json(self.compiled.executors[component.executor_label].container))
        digest = hashlib.sha256(container.encode()).hexdigest()
        pod = self.compiled.pod(component.executor_label)
        patch = pod_patch(self.compiled, Call(name, component, task.inputs.parameters, values), self.assumed)
        given = {
            "component": self.texts.get(f"components-{digest}", ""),
            "task": dumps(as_json(task)),
            "container": container,
            "task-name": name,
            "parent-dag-id": "100",
            "iteration-index": "-1",
            "kubernetes-config": self.texts.get(f"kubernetes-{task.component_ref.name}", ""),
        }
        outputs = {"pod-spec-patch": patch, "cached-decision": "false", "condition": "nil"}
        yield from self.pair(
            stage,
            f"{place}-driver",
            "system-container-driver",
            [place],
            inputs={"parameters": _parameters(given)},
            outputs={"parameters": _outputs(outputs), "exitCode": "0"},
        )
        prefix = template_prefix(task, pod)
        executor, impl = f"{prefix}system-container-executor", f"{prefix}system-container-impl"
        passed = {"pod-spec-patch": patch, **pod_metadata(pod), **retries(task)}
        inputs = {"parameters": _parameters({"cached-decision": "false", **passed})}
        yield from self.box(stage, place, executor, [f"{place}(0).executor", *after], {"inputs": inputs})
        rest: dict[str, Json] = {"inputs": {"parameters": _parameters(passed, defaults=False)}}
        rest["outputs"] = {"exitCode": "0"}
        name = f"{place}(0).executor"
        yield self.node(stage, name, "Retry", impl, children=[self.id_of(f"{name}(0)")], **rest)
        yield self.node(stage, f"{name}(0)", "Pod", impl, **rest)

    def group(self, name: str, task: Task, place: str, stage: str, dag: Dag) -> Iterator[Node]:
        """Yields a sub-DAG's driver and boxes, and what is in it. Its inputs are values of the run, as a stage's."""
        reference = task.component_ref.name
        yield from self.dag_driver(stage, f"{place}-driver", place, f"components-{reference}", task, name)
        first = [f"{place}(0).{item}-driver" for item in sorted(dag) if not dag[item].dependent_tasks]
        yield from self.box(stage, place, reference, first, {"inputs": {"parameters": _parent()}})
        inside = dict.fromkeys(self.compiled.component(task).input_definitions.parameters, self.assumed.value)
        yield from self.dag(dag, f"{place}(0)", stage, inside)

    def dag_driver(
        self, stage: str, name: str, after: str, component: str, task: Task | None, task_name: str, **rest: str
    ) -> Iterator[Node]:
        """Yields the driver of a DAG."""
        given = {
            "component": self.texts[component],
            "runtime-config": "",
            "task": "" if task is None else dumps(as_json(task)),
            "task-name": task_name,
            "parent-dag-id": "100",
            "iteration-index": "-1",
            "driver-type": "DAG",
            **rest,
        }
        outputs = {"execution-id": "100", "iteration-count": "0", "condition": "nil"}
        yield from self.pair(
            stage,
            name,
            "system-dag-driver",
            [after],
            inputs={"parameters": _parameters(given)},
            outputs={"parameters": _outputs(outputs), "exitCode": "0"},
        )

    def loop(self, name: str, task: Task, place: str, stage: str) -> Iterator[Node]:
        """Yields the nodes of a loop: its own, and of each iteration a driver, two boxes and what is in it."""
        reference = task.component_ref.name
        driver, items = f"{place}(0).iteration-driver", f"{place}(0).iteration-iterations"
        yield from self.box(
            stage, place, f"{reference}-{name}-iterator", [driver], {"inputs": {"parameters": _parent()}}
        )
        yield from self.dag_driver(stage, driver, items, f"components-{reference}", task, name)
        yield self.node(stage, items, "TaskGroup", f"{reference}-iteration", nodeFlag={})
        dag = self.compiled.component(task).dag.tasks
        for index in range(self.assumed.iterations(task)):
            each = f"{items}({index}:{index})"
            inputs: Json = {"parameters": [*_parent(), {"name": "iteration-index", "value": str(index)}]}
            inside = f"{each}(0).iteration-item"
            yield from self.box(stage, each, f"{reference}-iteration", [f"{inside}-driver"], {"inputs": inputs})
            yield from self.group(name, task, inside, stage, dag)
            if self.counted["nodes"] > MAX_NODES:
                return


def nodes(compiled: Compiled, texts: Mapping[str, str], assumed: Assumed) -> list[Node]:
    """Returns the nodes of a workflow whose stages have all run and ended.

    Args:
        compiled: The compiled file.
        texts: The workflow's arguments (see `spec.arguments`).
        assumed: What is known at run time alone.
    """
    writer = _Writer(compiled, assumed, texts)
    top = f"{writer.workflow}(0)"
    config = dumps({"parameterValues": compiled.root_values})
    made = list(writer.box("", writer.workflow, "entrypoint", [f"{top}.root-driver"], {}))
    driver = writer.dag_driver(
        "", f"{top}.root-driver", f"{top}.root", "components-root", None, "", **{"runtime-config": config}
    )
    made.extend(driver)
    made.extend(writer.box("", f"{top}.root", "root", [f"{top}.root(0)"], {"inputs": {"parameters": _parent()}}))
    made.extend(writer.dag(compiled.spec.root.dag.tasks, f"{top}.root(0)", "", compiled.root_values))
    return made


_DEFAULTS = {"parent-dag-id": "0", "iteration-index": "-1", "driver-type": "DAG", "cached-decision": "false"}
_DAG_DRIVER = frozenset({"runtime-config", "task", "task-name", "parent-dag-id", "driver-type"})


def _parameters(given: Mapping[str, str], *, defaults: bool = True) -> list[Json]:
    """Returns the inputs of a node, with the defaults that its template declares."""
    of_dag = "driver-type" in given
    made: list[Json] = []
    for key, value in given.items():
        declared: dict[str, str] = {}
        if key in _DAG_DRIVER:
            declared = {"default": _DEFAULTS.get(key, "")} if of_dag else {}
        elif key in _DEFAULTS or key == "kubernetes-config":
            declared = {"default": _DEFAULTS.get(key, "")}
        elif key.startswith("retry-") and defaults:
            declared = {"default": "0"}
        made.append({"name": key, **declared, "value": value})
    return made


def _outputs(given: Mapping[str, str]) -> list[Json]:
    made: list[Json] = []
    for key, value in given.items():
        source = {"path": f"/tmp/outputs/{key}"} | ({} if key == "execution-id" else {"default": "false"})
        made.append({"name": key, "value": value, "valueFrom": source})
    return made


def _parent() -> list[Json]:
    return [{"name": "parent-dag-id", "value": "100"}]
