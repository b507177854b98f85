"""The pod of a task: the container of the compiled pipeline with its placeholders filled, as KFP's driver makes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes_config
from kfp.local import executor_input_utils, executor_output_utils, placeholder_utils
from kfp.pipeline_spec import pipeline_spec_pb2 as ir

from tests.end_to_end.cluster.graph import Task

OUTPUT_FILE = "/tmp/kfp_outputs/output_metadata.json"
OUTPUT_PARAMETERS = "/tmp/kfp/outputs"
SCRATCH = {"tmp": "/tmp", "s3-scratch": "/s3", "dot-local": "/.local", "dot-cache": "/.cache", "dot-config": "/.config"}
"""Folders that a stage may write to, all but the first also KFP's: the root file system is read-only."""

HANDLED = {
    "secret_as_env",
    "pod_metadata",
    "node_selector",
    "tolerations",
    "image_pull_secret",
    "field_path_as_env",
    "empty_dir_mounts",
    "security_context",
}
"""What kfp-kubernetes can set and this file turns into a part of the pod."""


@dataclass(frozen=True)
class Place:
    """Where and as whom pods run.

    Attributes:
        run_id: The run's id in the backend.
        root: Address below which artifacts go.
        service_account: Account of every pod.
        launcher: Name of the ConfigMap that holds `launcher.py`.
        host_network: Whether pods share the node's network, to reach a store on the loopback device.
    """

    run_id: str
    root: str
    service_account: str
    launcher: str
    host_network: bool


def executor_input(task: Task, place: Place, folder: str) -> ir.ExecutorInput:
    """Returns what a stage is told: its inputs, and where its outputs go."""
    found = executor_input_utils.construct_executor_input(task.component, task.arguments, folder, True)
    found.outputs.output_file = OUTPUT_FILE
    for name, parameter in found.outputs.parameters.items():
        parameter.output_file = f"{OUTPUT_PARAMETERS}/{name}"
    return found


def outputs_of(task: Task, told: ir.ExecutorInput, message: str) -> dict[str, Any]:
    """Returns a task's outputs from what its pod left: the executor output, and parameters written to files."""
    left = json.loads(message)
    written = json_format.ParseDict(left["output"], ir.ExecutorOutput())
    for name, text in left["files"].items():
        written.parameter_values[name].string_value = text
    return executor_output_utils.get_outputs_from_executor_output(written, told, task.component)


def manifest(task: Task, told: ir.ExecutorInput, name: str, folder: str, place: Place) -> dict[str, Any]:
    """Returns the pod of one attempt at a task."""
    _refuse_unknown(task.config)
    volumes, mounts = _volumes(task.config, place)
    container = {
        "name": "main",
        "image": task.container.image,
        "command": ["python3", "/kfp-launcher/launcher.py", json.dumps(_outputs(told))],
        "args": _command(task, told, name, folder, place),
        "env": _environment(task),
        "resources": _resources(task.container.resources),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    config = task.config
    tolerations = [json_format.MessageToDict(toleration) for toleration in config.tolerations]
    return {
        "metadata": {"name": name, "labels": dict(config.pod_metadata.labels) | {"pipeline/runid": place.run_id}},
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": place.service_account,
            "hostNetwork": place.host_network,
            "nodeSelector": dict(config.node_selector.labels),
            "tolerations": tolerations,
            "imagePullSecrets": [{"name": _constant(secret)} for secret in config.image_pull_secret],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
            | _identity(config.security_context),
            "volumes": volumes,
            "containers": [container],
        },
    }


def _command(task: Task, told: ir.ExecutorInput, name: str, folder: str, place: Place) -> list[str]:
    return placeholder_utils.replace_placeholders(
        full_command=[*task.container.command, *task.container.args],
        executor_input_dict=executor_input_utils.executor_input_to_dict(told, task.component),
        pipeline_resource_name=place.run_id,
        task_resource_name=name,
        pipeline_root=place.root,
        unique_pipeline_id=place.run_id,
    )


def _outputs(told: ir.ExecutorInput) -> dict[str, Any]:
    addresses = [artifact.uri for found in told.outputs.artifacts.values() for artifact in found.artifacts]
    local = {"/s3/" + address.removeprefix("s3://"): address for address in addresses}
    parameters = {name: parameter.output_file for name, parameter in told.outputs.parameters.items()}
    folders = {path.rpartition("/")[0] for path in (OUTPUT_FILE, *parameters.values(), *local)}
    return {"folders": sorted(folders), "file": OUTPUT_FILE, "parameters": parameters, "artifacts": local}


def _volumes(
    config: kubernetes_config.KubernetesExecutorConfig, place: Place
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes: list[dict[str, Any]] = [{"name": "kfp-launcher", "configMap": {"name": place.launcher}}]
    volumes += [{"name": name, "emptyDir": {}} for name in SCRATCH]
    mounts = [{"name": "kfp-launcher", "mountPath": "/kfp-launcher", "readOnly": True}]
    mounts += [{"name": name, "mountPath": path} for name, path in SCRATCH.items()]
    for mount in config.empty_dir_mounts:
        settings = {"medium": mount.medium or None, "sizeLimit": mount.size_limit or None}
        volumes.append({"name": mount.volume_name, "emptyDir": settings})
        mounts.append({"name": mount.volume_name, "mountPath": mount.mount_path})
    return volumes, mounts


def _environment(task: Task) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": entry.name, "value": entry.value} for entry in task.container.env]
    for secret in task.config.secret_as_env:
        env += [
            {
                "name": key.env_var,
                "valueFrom": {"secretKeyRef": {"name": _constant(secret), "key": key.secret_key}},
            }
            for key in secret.key_to_env
        ]
    fields = {"KFP_POD_NAME": "metadata.name", "KFP_POD_UID": "metadata.uid", "NAMESPACE": "metadata.namespace"}
    fields |= {entry.name: entry.field_path for entry in task.config.field_path_as_env}
    return env + [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _resources(asked: ir.PipelineDeploymentConfig.PipelineContainerSpec.ResourceSpec) -> dict[str, dict[str, str]]:
    limits = {"cpu": asked.resource_cpu_limit, "memory": asked.resource_memory_limit}
    if asked.accelerator.resource_type:
        limits[asked.accelerator.resource_type] = asked.accelerator.resource_count
    requests = {"cpu": asked.resource_cpu_request, "memory": asked.resource_memory_request}
    both = {"limits": limits, "requests": requests}
    return {kind: {name: value for name, value in found.items() if value} for kind, found in both.items()}


def _identity(context: kubernetes_config.SecurityContext) -> dict[str, int]:
    given = {"runAsUser": context.run_as_user, "runAsGroup": context.run_as_group}
    return {name: value for name, value in given.items() if value}


def _constant(reference: Any) -> str:
    return str(reference.secret_name_parameter.runtime_value.constant.string_value or reference.secret_name)


def _refuse_unknown(config: kubernetes_config.KubernetesExecutorConfig) -> None:
    unknown = {field.name for field, _ in config.ListFields()} - HANDLED
    if unknown:
        raise NotImplementedError(f"the pods of these tests would silently lack {sorted(unknown)}")
