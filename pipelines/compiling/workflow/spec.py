"""The specification of the workflow that Kubeflow Pipelines' compiler makes of a compiled file.

Its arguments hold each component, its container and its Kubernetes settings once, as text. Its templates hold each
task twice: its driver, with the task's own specification as text, and its executor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes_pb2
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

Task: TypeAlias = pipeline_pb2.PipelineTaskSpec

FIXED_BYTES = 700 + 2384 + 2196
"""What every workflow has, measured: service account, metadata of pods, retry defaults, both drivers' templates."""
EXECUTOR_BYTES = 484 + 2026
"""Templates of a stage's executor and of its pod, one pair for all stages that have as many labels."""
RETRY_BYTES = 545 + 441
"""What a retry policy adds to them."""
METADATA_BYTES = 258 + 207
"""What each label adds to them; an annotation adds a little more."""


def arguments(compiled: Compiled) -> dict[str, str]:
    """Returns the workflow's arguments: each component, container and set of Kubernetes settings as text."""
    texts = {"components-root": dumps(as_json(compiled.spec.root))}
    for name, component in sorted(compiled.spec.components.items()):
        if not component.executor_label:
            texts[f"components-{name}"] = dumps(as_json(component))
            continue
        container = dumps(as_json(compiled.executors[component.executor_label].container))
        digest = hashlib.sha256(container.encode()).hexdigest()
        texts.setdefault(f"components-{digest}", dumps(as_json(component)))
        texts.setdefault(f"implementations-{digest}", container)
        if settings := compiled.settings(component.executor_label):
            texts[f"kubernetes-{name}"] = dumps(settings)
    return texts


def spec_size(compiled: Compiled) -> int:
    """Returns the bytes of the workflow's specification."""
    entries: list[Json] = [{"name": name, "value": text} for name, text in arguments(compiled).items()]
    templates = [size_of(template) + 1 for template in _templates(compiled)]
    return FIXED_BYTES + 2 * len(compiled.name) + size_of(entries) + sum(templates) + sum(_executors(compiled))


def _executors(compiled: Compiled) -> Iterable[int]:
    """Yields the bytes of the templates that executors share."""
    kinds: dict[str, tuple[Task, kubernetes_pb2.KubernetesExecutorConfig]] = {}
    for dag in _dags(compiled).values():
        for task in dag.values():
            if label := compiled.component(task).executor_label:
                pod = compiled.pod(label)
                kinds[template_prefix(task, pod)] = task, pod
    for prefix, (task, pod) in kinds.items():
        yield EXECUTOR_BYTES + 3 * len(prefix) + METADATA_BYTES * (len(pod_metadata(pod)) // 2)
        yield RETRY_BYTES if task.HasField("retry_policy") else 0


def _dags(compiled: Compiled) -> dict[str, Dag]:
    dags: dict[str, Dag] = {"root": compiled.spec.root.dag.tasks}
    dags.update({name: item.dag.tasks for name, item in compiled.spec.components.items() if item.dag.tasks})
    return dags


def _templates(compiled: Compiled) -> Iterable[Json]:
    config = dumps({"parameterValues": compiled.root_values})
    yield _template("entrypoint", [*_dag_task("root", "root", {"runtime-config": config, "driver-type": "ROOT_DAG"})])
    for name, dag in _dags(compiled).items():
        entries: list[Json] = []
        for task_name, task in sorted(dag.items()):
            if _is_exit_hook(task):
                yield _template(f"exit-hook-root-{task_name}", [*_entries(compiled, task_name, task)])
                continue
            entries.extend(_entries(compiled, task_name, task))
            if task.HasField("parameter_iterator") or task.HasField("artifact_iterator"):
                yield from _loop(task_name, task)
        yield _template(name, entries)


def _template(name: str, tasks: list[Json], *inputs: str) -> Json:
    annotations = {"pipelines.kubeflow.org/v2_component": "true", "sidecar.istio.io/inject": "false"}
    parameters: list[Json] = [{"name": key} for key in ("parent-dag-id", *inputs)]
    return {
        "name": name,
        "inputs": {"parameters": parameters},
        "outputs": {},
        "metadata": {"annotations": annotations},
        "dag": {"tasks": tasks},
    }


def _entries(compiled: Compiled, name: str, task: Task) -> Iterable[Json]:
    component = compiled.component(task)
    if task.HasField("parameter_iterator") or task.HasField("artifact_iterator"):
        reference = task.component_ref.name
        yield _entry(name, f"{reference}-{name}-iterator", _parent(), task)
    elif component.executor_label:
        yield from _container_task(compiled, name, task, component.executor_label)
    else:
        texts = {"component": _argument(f"components-{task.component_ref.name}"), **_parent()}
        yield from _dag_task(
            name, task.component_ref.name, {**texts, "task": dumps(as_json(task)), "task-name": name}, task
        )


def _container_task(compiled: Compiled, name: str, task: Task, label: str) -> Iterable[Json]:
    digest = "0" * 64
    pod = compiled.pod(label)
    given = {
        "component": _argument(f"components-{digest}"),
        "task": dumps(as_json(task)),
        "container": _argument(f"implementations-{digest}"),
        "task-name": name,
        **_parent(),
    }
    if compiled.settings(label):
        given["kubernetes-config"] = _argument(f"kubernetes-{task.component_ref.name}")
    yield _entry(f"{name}-driver", "system-container-driver", given, task)
    outputs = f"{{{{tasks.{name}-driver.outputs.parameters."
    passed = {"pod-spec-patch": f"{outputs}pod-spec-patch}}}}", "cached-decision": f"{outputs}cached-decision}}}}"}
    passed.update({**pod_metadata(pod), **retries(task)})
    template = f"{template_prefix(task, pod)}system-container-executor"
    yield _entry(name, template, passed, depends=f"{name}-driver.Succeeded")


def _dag_task(name: str, template: str, given: Mapping[str, str], task: Task | None = None) -> Iterable[Json]:
    yield _entry(f"{name}-driver", "system-dag-driver", given, task)
    outputs = f"{{{{tasks.{name}-driver.outputs.parameters."
    passed = {"parent-dag-id": f"{outputs}execution-id}}}}", "condition": f"{outputs}condition}}}}"}
    when = f"{outputs}condition}}}} != false" if task is not None and task.trigger_policy.condition else ""
    yield _entry(name, template, passed, depends=f"{name}-driver.Succeeded", when=when)


def _loop(name: str, task: Task) -> Iterable[Json]:
    reference = task.component_ref.name
    given = {
        "component": _argument(f"components-{reference}"),
        **_parent(),
        "task": dumps(as_json(task)),
        "task-name": name,
    }
    item = {**given, "iteration-index": "{{inputs.parameters.iteration-index}}"}
    yield _template(f"{reference}-iteration", [*_dag_task("iteration-item", reference, item)], "iteration-index")
    passed = {
        "parent-dag-id": "{{tasks.iteration-driver.outputs.parameters.execution-id}}",
        "iteration-index": "{{item}}",
    }
    iterations = _entry("iteration-iterations", f"{reference}-iteration", passed, depends="iteration-driver.Succeeded")
    sequence = {"withSequence": {"count": "{{tasks.iteration-driver.outputs.parameters.iteration-count}}"}}
    driver = _entry("iteration-driver", "system-dag-driver", given)
    yield _template(f"{reference}-{name}-iterator", [driver, {**iterations, **sequence}])


def _entry(
    name: str, template: str, given: Mapping[str, str], task: Task | None = None, *, depends: str = "", when: str = ""
) -> dict[str, Json]:
    """Returns one task of a template; `depends` is worked out for a task of the file."""
    parameters: list[Json] = []
    for key, value in given.items():
        default = {"default": "false"} if key == "cached-decision" else {}
        parameters.append({"name": key, **default, "value": value})
    entry: dict[str, Json] = {"name": name, "template": template, "arguments": {"parameters": parameters}}
    if task is not None:
        depends = " && ".join(f"{upstream}.Succeeded" for upstream in task.dependent_tasks)
    return entry | ({"depends": depends} if depends else {}) | ({"when": when} if when else {})


def _is_exit_hook(task: Task) -> bool:
    strategy = pipeline_pb2.PipelineTaskSpec.TriggerPolicy.ALL_UPSTREAM_TASKS_COMPLETED
    return bool(task.trigger_policy.strategy == strategy)


def _argument(name: str) -> str:
    return f"{{{{workflow.parameters.{name}}}}}"


def _parent() -> dict[str, str]:
    return {"parent-dag-id": "{{inputs.parameters.parent-dag-id}}"}
