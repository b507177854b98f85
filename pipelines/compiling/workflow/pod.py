"""The patch of a stage's pod: its whole container, as Kubeflow's driver writes it for Argo."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes_pb2
from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline_pb2

from baton.pipelines.compiling.workflow.documents import Compiled, Json, as_json, dumps

_LOGS: Mapping[str, Json] = {"schemaTitle": "system.Artifact"}
_SERVERS = (
    "--pod_name $(KFP_POD_NAME) --pod_uid $(KFP_POD_UID) --ml_pipeline_server_address "
    "ml-pipeline.kubeflow.svc.cluster.local --ml_pipeline_server_port 8887 --mlmd_server_address "
    "metadata-grpc-service.kubeflow.svc.cluster.local --mlmd_server_port 8080 "
    "--publish_logs true --publish_logs true --"
)


@dataclass(frozen=True)
class Assumed:
    """What a compiled file does not say."""

    pipeline_root: str = "s3://mlpipeline/v2/artifacts"
    """Where Kubeflow keeps artifacts; the standard installation's."""
    value: str = "s3://bucket/folder/runs/name-0f9e8d7c-6b5a-4938-8271-605f4e3d2c1b#2026-01-02T03:04:05.678Z.0"
    """A text that one stage hands to the next: the address of a run, which ends in the id of the pipeline's run."""
    trials: int = 8
    """Iterations of a loop over items that an earlier stage hands out."""
    loops: Mapping[str, int] = field(default_factory=dict)
    """The same by the loop's name, where it is known."""
    environment: Mapping[str, str] | None = None
    """Variables that the cluster adds to each pod, as Kubeflow's MLflow plugin does."""

    def iterations(self, task: pipeline_pb2.PipelineTaskSpec) -> int:
        """Returns how often a loop runs: once per item where the file holds them."""
        items = task.parameter_iterator.items.raw
        return len(json.loads(items)) if items else self.loops.get(task.task_info.name, self.trials)


@dataclass(frozen=True)
class Call:
    """A task's call of a component."""

    name: str
    component: pipeline_pb2.ComponentSpec
    inputs: Mapping[str, pipeline_pb2.TaskInputsSpec.InputParameterSpec]
    values: Mapping[str, Json]
    """What the graph around it takes in."""


def pod_patch(compiled: Compiled, call: Call, assumed: Assumed) -> str:
    """Returns the patch of a stage's pod as text."""
    container = compiled.executors[call.component.executor_label].container
    pod = compiled.pod(call.component.executor_label)
    run = _random_uuid(compiled.name)
    command: list[Json] = ["/kfp-launcher/launch", "--pipeline_name", compiled.name, "--run_id", run]
    command += ["--execution_id", "100", "--executor_input", _executor_input(compiled, run, call, assumed)]
    command += ["--component_spec", _component_spec(call.component), *_SERVERS.split()]
    main: dict[str, Json] = {
        "name": "main",
        "image": container.image,
        "command": command,
        "args": [*container.command, *container.args],
        "env": _environment(container, pod, assumed),
        "resources": _resources(container),
    }
    if mounts := _mounts(pod):
        main["volumeMounts"] = [{"name": name, "mountPath": path} for name, path, _ in mounts]
    if pod.HasField("security_context"):
        main["securityContext"] = {"capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    patch: dict[str, Json] = {"volumes": [{"name": name, **volume} for name, _, volume in mounts]} if mounts else {}
    patch["containers"] = [main]
    settings = as_json(pod)
    for key in (
        "nodeSelector",
        "tolerations",
        "imagePullSecret",
        "nodeAffinity",
        "podAffinity",
        "activeDeadlineSeconds",
    ):
        if key in settings:
            patch[key] = settings[key]
    return dumps(patch, ordered=False)


def _executor_input(compiled: Compiled, run: str, call: Call, assumed: Assumed) -> str:
    folder = f"{assumed.pipeline_root}/{compiled.name}/{run}/{call.name}/{_random_uuid(f'{run}{call.name}')}"
    given: dict[str, Json] = {}
    for key, source in sorted(call.inputs.items()):
        if source.WhichOneof("kind") == "runtime_value":
            constant = as_json(source.runtime_value).get("constant")
            given[key] = run if isinstance(constant, str) and constant.startswith("{{$.pipeline_job") else constant
        else:
            known = call.values.get(source.component_input_parameter, assumed.value)
            given[key] = compiled.longest(key) or known
    definitions = call.component.output_definitions
    artifacts: dict[str, Json] = {"executor-logs": _artifact("executor-logs", _LOGS, folder)}
    for key, artifact in sorted(definitions.artifacts.items()):
        artifacts[key] = _artifact(key, as_json(artifact.artifact_type), folder)
    files = {key: {"outputFile": f"/tmp/kfp/outputs/{key}"} for key in sorted(definitions.parameters)}
    outputs: dict[str, Json] = {"parameters": files, "artifacts": artifacts}
    outputs["outputFile"] = f"{folder.replace('s3://', '/s3/')}/output_metadata.json"
    return dumps({"inputs": {"parameterValues": given}, "outputs": outputs}, between=", ", ordered=False)


def _artifact(name: str, kind: Mapping[str, Json], folder: str) -> Json:
    return {"artifacts": [{"name": name, "type": kind, "uri": f"{folder}/{name}"}]}


def _component_spec(component: pipeline_pb2.ComponentSpec) -> str:
    described = as_json(component)
    outputs = described.get("outputDefinitions", {})
    artifacts = outputs.get("artifacts", {}) if isinstance(outputs, Mapping) else {}
    if isinstance(outputs, Mapping) and isinstance(artifacts, Mapping):
        logs = {"executor-logs": {"artifactType": _LOGS}}
        described["outputDefinitions"] = {**outputs, "artifacts": {**artifacts, **logs}}
    return dumps(described, between=", ")


def _environment(
    container: pipeline_pb2.PipelineDeploymentConfig.PipelineContainerSpec,
    pod: kubernetes_pb2.KubernetesExecutorConfig,
    assumed: Assumed,
) -> list[Json]:
    variables: list[Json] = [{"name": item.name, "value": item.value} for item in container.env]
    for secret in pod.secret_as_env:
        for pair in secret.key_to_env:
            key = {"name": secret.secret_name, "key": pair.secret_key, "optional": False}
            variables.append({"name": pair.env_var, "valueFrom": {"secretKeyRef": key}})
    for config in pod.config_map_as_env:
        for entry in config.key_to_env:
            key = {"name": config.config_map_name, "key": entry.config_map_key, "optional": False}
            variables.append({"name": entry.env_var, "valueFrom": {"configMapKeyRef": key}})
    for path in pod.field_path_as_env:
        variables.append({"name": path.name, "valueFrom": {"fieldRef": {"fieldPath": path.field_path}}})
    variables.extend({"name": name, "value": value} for name, value in (assumed.environment or {}).items())
    return variables


def _resources(container: pipeline_pb2.PipelineDeploymentConfig.PipelineContainerSpec) -> Json:
    asked = container.resources
    limits = {"cpu": asked.resource_cpu_limit, "memory": asked.resource_memory_limit}
    limits[asked.accelerator.resource_type] = asked.accelerator.resource_count
    requests = {"cpu": asked.resource_cpu_request, "memory": asked.resource_memory_request}
    made: dict[str, Json] = {}
    for kind, amounts in (("limits", limits), ("requests", requests)):
        if filled := {key: amount for key, amount in amounts.items() if key and amount}:
            made[kind] = filled
    return made


def _mounts(pod: kubernetes_pb2.KubernetesExecutorConfig) -> list[tuple[str, str, dict[str, Json]]]:
    """Returns name, path and definition of a pod's volumes."""
    mounts: list[tuple[str, str, dict[str, Json]]] = []
    for empty in pod.empty_dir_mounts:
        kept: Json = {"medium": empty.medium, "sizeLimit": empty.size_limit}
        mounts.append((empty.volume_name, empty.mount_path, {"emptyDir": kept}))
    for claim in pod.pvc_mount:
        name = claim.constant or claim.pvc_name_parameter.runtime_value.constant.string_value
        mounts.append((name, claim.mount_path, {"persistentVolumeClaim": {"claimName": name}}))
    for secret in pod.secret_as_volume:
        mounts.append((secret.secret_name, secret.mount_path, {"secret": {"secretName": secret.secret_name}}))
    return mounts


def _random_uuid(text: str) -> str:
    """Returns an id that looks as random as Kubeflow's."""
    return str(uuid.UUID(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()))
