"""Offline conformance check of a compiled pipeline, without a cluster.

A compiled file holds the pipeline spec and, when a task has Kubernetes settings, a platform spec
as its second document. A backend parses both with the schemas used here, then Argo runs the
graph; what either would refuse, or notice hours into a run, is a problem in the list. Whether
the workflow fits a cluster is for `baton.compiler.pipeline_file` to say: here any size runs.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes_pb2
from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline_pb2

Parsed = TypeVar("Parsed")
Executors: TypeAlias = Mapping[str, pipeline_pb2.PipelineDeploymentConfig.ExecutorSpec]
Component: TypeAlias = pipeline_pb2.ComponentSpec
Components: TypeAlias = Mapping[str, Component]
Task: TypeAlias = pipeline_pb2.PipelineTaskSpec
Source: TypeAlias = pipeline_pb2.TaskInputsSpec.InputParameterSpec | pipeline_pb2.TaskInputsSpec.InputArtifactSpec

_PLACEHOLDER = re.compile(r"\{\{\$\.pipeline_\w+\}\}")
"""A run's id, name or times, which the driver puts in place where it is all of a constant, and nowhere else."""
_OWN_BRACES = re.compile(r"\{\{\$[^{}]*\}\}")
"""What kfp itself writes between two braces: placeholders of its own driver, which Argo leaves."""
_CREDENTIAL_ENDINGS = ("SECRET", "TOKEN", "PASSWORD", "APIKEY", "ACCESSKEY")
_REFERENCE_WORDS = frozenset({"NAME", "FILE", "PATH", "REF"})
_REFERENCE_FIELDS = frozenset({"key", "secretKey", "configMapKey", "topologyKey", "outputParameterKey"})
"""The schema's own fields that sound like credentials and only refer to something."""
_BACKEND_SUPPLIED = frozenset({"TASK_FINAL_STATUS", "TASK_CONFIG"})


def check_documents(documents: Sequence[object]) -> list[str]:
    """Returns the problems of a compiled file's documents: a pipeline spec, then perhaps a platform spec.

    One line each, naming the place and what was expected.
    """
    if not 1 <= len(documents) <= 2 or not all(isinstance(document, Mapping) for document in documents):
        kinds = ", ".join(type(document).__name__ for document in documents) or "nothing"
        return [f"file: expected a pipeline spec and perhaps a platform spec, as mappings; found {kinds}."]
    problems: list[str] = []
    spec = _parse(documents[0], pipeline_pb2.PipelineSpec, "pipeline spec", problems)
    if spec is None:
        return problems
    deployment = _parse(
        json_format.MessageToDict(spec.deployment_spec),
        pipeline_pb2.PipelineDeploymentConfig,
        "deploymentSpec",
        problems,
    )
    executors = {} if deployment is None else deployment.executors
    problems.extend(_executor_problems(executors))
    problems.extend(_component_problems(spec.components, executors))
    problems.extend(_graph_problems(spec))
    problems.extend(_repeated_ids(spec))
    for name, document in zip(("pipeline spec", "platform spec"), documents, strict=False):
        problems.extend(_foreign_braces(document, name))
    if len(documents) == 2:
        _check_platforms(documents[1], executors, problems)
    return problems


def _parse(document: object, schema: type[Parsed], place: str, problems: list[str]) -> Parsed | None:
    """Parses strictly; after a problem, leniently, so that the rest is checked too."""
    parsed = schema()
    try:
        json_format.ParseDict(document, parsed)
        return parsed
    except json_format.ParseError as error:
        problems.append(f"{place}: expected a valid {schema.__name__}; {error}")
    parsed = schema()
    try:
        json_format.ParseDict(document, parsed, ignore_unknown_fields=True)
    except json_format.ParseError:
        return None
    return parsed


def _executor_problems(executors: Executors) -> Iterator[str]:
    for label, executor in sorted(executors.items()):
        place = f"deploymentSpec.executors.{label}"
        kind = executor.WhichOneof("spec")
        if kind is None:
            yield f"{place}: is empty; expected a container or an importer."
        for field in ("image", "command") if kind == "container" else ():
            if not getattr(executor.container, field):
                yield f"{place}.container: expected {field}; it has none."
        for variable in executor.container.env:
            if variable.value and is_credential_name(variable.name):
                yield literal_credential(f"{place}.container.env.{variable.name}")


def _component_problems(components: Components, executors: Executors) -> Iterator[str]:
    for name, component in sorted(components.items()):
        label = component.executor_label
        if component.WhichOneof("implementation") is None:
            yield f"components.{name}: expected an executorLabel or a dag; it has neither."
        elif label and label not in executors:
            yield _absent(f"components.{name}", f"executorLabel '{label}'", executors)


@dataclass(frozen=True)
class _Dag:
    """One DAG, with what its tasks may refer to."""

    place: str
    tasks: Mapping[str, Task]
    outputs: pipeline_pb2.DagOutputsSpec
    inputs: pipeline_pb2.ComponentInputsSpec
    components: Components

    def component_of(self, task: str) -> Component | None:
        """Returns the component a task runs, or None where the reference is broken."""
        name = self.tasks[task].component_ref.name
        return self.components.get(name)


def _graph_problems(spec: pipeline_pb2.PipelineSpec) -> Iterator[str]:
    if not spec.root.dag.tasks:
        yield "root: expected at least one task; it has none."
    nested: dict[str, set[str]] = {}
    owners = {"root": spec.root, **{f"components.{name}": c for name, c in spec.components.items()}}
    for place, owner in sorted(owners.items()):
        tasks = owner.dag.tasks
        nested[place] = {f"components.{task.component_ref.name}" for task in tasks.values()}
        dag = _Dag(f"{place}.dag", tasks, owner.dag.outputs, owner.input_definitions, spec.components)
        for name, task in sorted(tasks.items()):
            yield from _task_problems(dag, name, task)
        yield from _dag_output_problems(dag)
        yield from _cycle_problems(dag.place, {name: _upstream(task) for name, task in tasks.items()})
    yield from _cycle_problems("components", nested)


def _repeated_ids(spec: pipeline_pb2.PipelineSpec) -> Iterator[str]:
    """Yields the task ids of several graphs: Kubeflow's page fails where one of them has run and another has not."""
    graphs: dict[str, list[str]] = {}

    def collect(component: Component, place: str, depth: int) -> None:
        for name, task in component.dag.tasks.items():
            graphs.setdefault(name, []).append(place)
            inner = spec.components.get(task.component_ref.name)
            if inner is not None and depth < len(spec.components):  # a graph inside itself is told elsewhere
                collect(inner, f"{place}.{name}", depth + 1)

    collect(spec.root, "root", 0)
    for name, places in sorted(graphs.items()):
        if len(places) > 1:
            yield f"root: expected ids of tasks once; '{name}' is in {' and in '.join(sorted(places))}."


def _foreign_braces(node: object, place: str) -> Iterator[str]:
    """Yields the texts with two braces that are not kfp's own: Argo replaces what it finds between them."""
    if isinstance(node, Mapping):
        for key, entry in node.items():
            yield from _foreign_braces(entry, f"{place}.{key}")
    elif isinstance(node, (list, tuple)):
        for position, entry in enumerate(node):
            yield from _foreign_braces(entry, f"{place}[{position}]")
    elif isinstance(node, str) and "{{" in _OWN_BRACES.sub("", node):
        yield f"{place}: '{node[:60]}' holds two braces beside each other; expected none but kfp's own."


def _task_problems(dag: _Dag, name: str, task: Task) -> Iterator[str]:
    place = f"{dag.place}.tasks.{name}"
    for upstream in task.dependent_tasks:
        if upstream not in dag.tasks:
            yield _absent(f"{place}.dependentTasks", f"task '{upstream}'", dag.tasks)
    for kind in ("parameter", "artifact"):
        for key, source in sorted(getattr(task.inputs, f"{kind}s").items()):
            yield from _source_problems(dag, f"{place}.inputs.{key}", kind, source)
    component = dag.component_of(name)
    if component is None:
        yield _absent(f"{place}.componentRef", f"component '{task.component_ref.name}'", dag.components)
        return
    for kind in ("parameter", "artifact"):
        yield from _signature_problems(place, kind, task, component)


def _signature_problems(place: str, kind: str, task: Task, component: Component) -> Iterator[str]:
    """Compares what a task supplies with what its component declares."""
    declared = getattr(component.input_definitions, f"{kind}s")
    supplied = set(getattr(task.inputs, f"{kind}s"))
    iterator = getattr(task, f"{kind}_iterator")
    looped_over = getattr(iterator.items, f"input_{kind}")
    if looped_over and looped_over not in supplied:
        yield _absent(f"{place}.{kind}Iterator", f"input '{looped_over}'", supplied)
    if iterator.item_input:
        supplied.add(iterator.item_input)
    for key in sorted(supplied - set(declared)):
        yield _absent(f"{place}.inputs", f"{kind} '{key}' of '{task.component_ref.name}'", declared)
    for key, definition in sorted(declared.items()):
        if key not in supplied and _is_required(kind, definition):
            yield f"{place}.inputs: expected {kind} '{key}', which '{task.component_ref.name}' requires."


def _is_required(kind: str, definition: pipeline_pb2.ComponentInputsSpec.ParameterSpec) -> bool:
    if kind == "artifact" or definition.is_optional:
        return not definition.is_optional
    type_name = pipeline_pb2.ParameterType.ParameterTypeEnum.Name(definition.parameter_type)
    return not definition.HasField("default_value") and type_name not in _BACKEND_SUPPLIED


def _source_problems(dag: _Dag, place: str, kind: str, source: Source) -> Iterator[str]:
    origin = source.WhichOneof("kind")
    if origin is None:
        yield f"{place}: expected a source: a constant, an input of the DAG or the output of a task."
    elif origin == "runtime_value":
        constant = source.runtime_value.constant.string_value
        if (match := _PLACEHOLDER.search(constant)) and match[0] != constant:
            yield f"{place}: '{match[0]}' stands inside a longer text; expected it alone, or the backend leaves it."
    elif origin == f"component_input_{kind}":
        key, inputs = getattr(source, origin), getattr(dag.inputs, f"{kind}s")
        if key not in inputs:
            yield _absent(place, f"{kind} '{key}' among the inputs of {dag.place}", inputs)
    elif origin == f"task_output_{kind}":
        output = getattr(source, origin)
        key = getattr(output, f"output_{kind}_key")
        yield from _producer_problems(dag, place, kind, output.producer_task, key)
    elif origin == "task_final_status" and source.task_final_status.producer_task not in dag.tasks:
        yield _absent(place, f"producer task '{source.task_final_status.producer_task}'", dag.tasks)


def _producer_problems(dag: _Dag, place: str, kind: str, producer: str, key: str) -> Iterator[str]:
    if producer not in dag.tasks:
        yield _absent(place, f"producer task '{producer}'", dag.tasks)
        return
    component = dag.component_of(producer)
    outputs = {} if component is None else getattr(component.output_definitions, f"{kind}s")
    if component is not None and key not in outputs:
        yield _absent(place, f"output {kind} '{key}' of '{producer}'", outputs)


def _dag_output_problems(dag: _Dag) -> Iterator[str]:
    for name, output in sorted(dag.outputs.artifacts.items()):
        place = f"{dag.place}.outputs.{name}"
        for chosen in output.artifact_selectors:
            key = chosen.output_artifact_key
            yield from _producer_problems(dag, place, "artifact", chosen.producer_subtask, key)
    for name, output in sorted(dag.outputs.parameters.items()):
        place = f"{dag.place}.outputs.{name}"
        single = [output.value_from_parameter] if output.HasField("value_from_parameter") else []
        for chosen in [*single, *output.value_from_oneof.parameter_selectors]:
            key = chosen.output_parameter_key
            yield from _producer_problems(dag, place, "parameter", chosen.producer_subtask, key)


def _upstream(task: Task) -> set[str]:
    """Returns every task this one waits for, by declaration or by data."""
    names = set(task.dependent_tasks)
    names.update(p.task_output_parameter.producer_task for p in task.inputs.parameters.values())
    names.update(a.task_output_artifact.producer_task for a in task.inputs.artifacts.values())
    return names - {""}


def _cycle_problems(place: str, graph: Mapping[str, set[str]]) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"{place}: expected no cycle; found {' -> '.join(error.args[1])}."


def _check_platforms(document: object, executors: Executors, problems: list[str]) -> None:
    platforms = _parse(document, pipeline_pb2.PlatformSpec, "platform spec", problems)
    for name, platform in sorted({} if platforms is None else platforms.platforms.items()):
        if name != "kubernetes":
            problems.append(_absent("platforms", f"platform '{name}'", ["kubernetes"]))
        for label, settings in sorted(platform.deployment_spec.executors.items()):
            place = f"platforms.{name}.deploymentSpec.executors.{label}"
            if label not in executors:
                problems.append(_absent(place, f"executor '{label}' in the pipeline spec", executors))
            config = json_format.MessageToDict(settings)
            _parse(config, kubernetes_pb2.KubernetesExecutorConfig, place, problems)
    problems.extend(literal_credentials(document, ""))


def _absent(place: str, what: str, names: Iterable[str]) -> str:
    """Says that a name does not exist, and which do: the first six, then how many more."""
    known = sorted(names)
    rest = f" and {len(known) - 6} more" if len(known) > 6 else ""
    return f"{place}: {what} does not exist; expected one of: {', '.join(known[:6]) or 'none'}{rest}."


def is_credential_name(name: str) -> bool:
    """Tells whether a name looks like that of a credential's value.

    `HF_TOKEN`, `secretKey` and `PGPASSWORD` do. `TOKENIZERS_PARALLELISM` does not, and neither
    does what names or locates a secret: `secretName`, `HF_TOKEN_PATH`.
    """
    words = re.split(r"[^A-Z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper())
    if words[-1] in _REFERENCE_WORDS:
        return False
    return any(word == "KEY" or word.endswith(_CREDENTIAL_ENDINGS) for word in words)


def literal_credentials(node: object, place: str) -> Iterator[str]:
    """Finds literals under names a user chose; the schema's own names only refer to secrets."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = f"{place}.{key}".lstrip(".")
            is_literal = isinstance(value, str | int | float) and bool(value)
            if is_literal and is_credential_name(str(key)) and key not in _REFERENCE_FIELDS:
                yield literal_credential(where)
            yield from literal_credentials(value, where)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from literal_credentials(value, f"{place}[{index}]")


def literal_credential(place: str) -> str:
    """Says what is wrong with a credential that is written out."""
    return f"{place}: holds a credential; expected a reference to a Kubernetes secret (use_secret_as_env)."
