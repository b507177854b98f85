"""What a compiled file says, as Kubeflow's compiler and driver write it into a workflow: JSON text in JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from google.protobuf import json_format
from google.protobuf.message import Message
from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes_pb2
from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline_pb2

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
Dag: TypeAlias = Mapping[str, pipeline_pb2.PipelineTaskSpec]

_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def dumps(value: Json, between: str = ",", *, ordered: bool = True) -> str:
    """Returns JSON as Go writes it: whole floats as integers, `<`, `>` and `&` escaped, a map's keys in order."""
    return json.dumps(_as_go(value), separators=(between, ":"), sort_keys=ordered, ensure_ascii=False).translate(_HTML)


def size_of(value: Json) -> int:
    """Returns the bytes of a value as JSON."""
    return len(dumps(value).encode())


def _as_go(value: Json) -> Json:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _as_go(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_go(item) for item in value]
    return value


def as_json(message: Message) -> dict[str, Json]:
    """Returns a message in its canonical JSON form."""
    converted: dict[str, Json] = json_format.MessageToDict(message)
    return converted


@dataclass(frozen=True)
class Compiled:
    """A compiled file's two documents, read."""

    spec: pipeline_pb2.PipelineSpec
    executors: Mapping[str, pipeline_pb2.PipelineDeploymentConfig.ExecutorSpec]
    kubernetes: Mapping[str, Json] = field(default_factory=dict)
    """Kubernetes settings of an executor, as they stand in the file."""

    @classmethod
    def read(cls, documents: Sequence[object]) -> Compiled:
        """Reads the documents of a file that conforms (see `baton.pipelines.compiling.conformance`)."""
        spec, deployment = pipeline_pb2.PipelineSpec(), pipeline_pb2.PipelineDeploymentConfig()
        json_format.ParseDict(documents[0], spec, ignore_unknown_fields=True)
        json_format.ParseDict(as_json(spec.deployment_spec), deployment, ignore_unknown_fields=True)
        platforms = pipeline_pb2.PlatformSpec()
        for document in documents[1:]:
            json_format.ParseDict(document, platforms, ignore_unknown_fields=True)
        settings = as_json(platforms.platforms["kubernetes"].deployment_spec) if platforms.platforms else {}
        found = settings.get("executors")
        return cls(spec, deployment.executors, found if isinstance(found, Mapping) else {})

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return str(self.spec.pipeline_info.name)

    @property
    def root_values(self) -> dict[str, Json]:
        """The pipeline's parameters with their defaults."""
        parameters = as_json(self.spec.root).get("inputDefinitions", {})
        declared = parameters.get("parameters", {}) if isinstance(parameters, Mapping) else {}
        return {
            key: definition["defaultValue"]
            for key, definition in (declared.items() if isinstance(declared, Mapping) else ())
            if isinstance(definition, Mapping) and "defaultValue" in definition
        }

    def component(self, task: pipeline_pb2.PipelineTaskSpec) -> pipeline_pb2.ComponentSpec:
        """Returns the component that a task runs."""
        return self.spec.components[task.component_ref.name]

    def longest(self, key: str) -> str:
        """Returns the longest constant that a task of the file passes to an input of that name, empty without one."""
        return self._constants.get(key, "")

    @cached_property
    def _constants(self) -> Mapping[str, str]:
        longest: dict[str, str] = {}
        for dag in (self.spec.root.dag, *(item.dag for item in self.spec.components.values())):
            for task in dag.tasks.values():
                for key, source in task.inputs.parameters.items():
                    constant = source.runtime_value.constant.string_value
                    longest[key] = max(longest.get(key, ""), constant, key=len)
        return longest

    def settings(self, label: str) -> Json:
        """Returns the Kubernetes settings of an executor, empty where it has none."""
        return self.kubernetes.get(label, {})

    def pod(self, label: str) -> kubernetes_pb2.KubernetesExecutorConfig:
        """Returns the Kubernetes settings of an executor."""
        parsed = kubernetes_pb2.KubernetesExecutorConfig()
        json_format.ParseDict(self.settings(label), parsed, ignore_unknown_fields=True)
        return parsed


def retries(task: pipeline_pb2.PipelineTaskSpec) -> dict[str, str]:
    """Returns the arguments that a task's retry policy adds, none where it has no policy."""
    if not task.HasField("retry_policy"):
        return {}
    policy = task.retry_policy
    return {
        "retry-max-count": str(policy.max_retry_count),
        "retry-backoff-duration": str(policy.backoff_duration.seconds),
        "retry-backoff-factor": f"{policy.backoff_factor:g}",
        "retry-backoff-max-duration": str(policy.backoff_max_duration.seconds),
    }


def pod_metadata(pod: kubernetes_pb2.KubernetesExecutorConfig) -> dict[str, str]:
    """Returns the arguments that a pod's annotations and labels add."""
    arguments = {}
    for kind, entries in (("annotation", pod.pod_metadata.annotations), ("label", pod.pod_metadata.labels)):
        for number, (key, value) in enumerate(sorted(entries.items()), 1):
            arguments[f"pod-metadata-{kind}-key-{number}"] = key
            arguments[f"pod-metadata-{kind}-val-{number}"] = value
    return arguments


def template_prefix(task: pipeline_pb2.PipelineTaskSpec, pod: kubernetes_pb2.KubernetesExecutorConfig) -> str:
    """Returns what the names of a task's executor templates begin with; tasks with the same one share them."""
    metadata = pod.pod_metadata
    counted = f"metadata-{len(metadata.annotations)}-{len(metadata.labels)}-"
    counted = counted if metadata.annotations or metadata.labels else ""
    return counted + ("retry-" if task.HasField("retry_policy") else "")
