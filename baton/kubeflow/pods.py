"""Pods of a run as Kubernetes has them: a second source for the messages of the Argo workflow.

Only where a kubeconfig or the account of a pod is at hand. Words are those that Argo makes of a pod's status.
"""

import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from baton.kubeflow.connection import Node, Workflow
from baton.train.preemption import SERVICE_ACCOUNT, ask_api_server

KUBECONFIG = os.path.join("~", ".kube", "config")
_TIMEOUTS_S = (4, 10)  # to connect and to read
_PREFIX = "workflows.argoproj.io"
ENDED = ("Succeeded", "Failed")
QUEUE = "kueue.x-k8s.io/queue-name"  # label of a pod
ADMISSION = "kueue.x-k8s.io/admission"  # gate of a pod that Kueue has not admitted yet


def workflow(run_id: str, namespace: str) -> Workflow:
    """Returns the nodes of a run's workflow that have pods; none where Kubernetes cannot be asked or has no such pod.

    Args:
        run_id: Kubeflow's id of the run.
        namespace: Of its pods.
    """
    listed = _ask(f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"pipeline/runid={run_id}")
    found = json.loads(listed).get("items", []) if listed else []
    is_queued = any(QUEUE in pod["metadata"].get("labels", {}) for pod in found)
    nodes = tuple(_nodes(found, _workloads(namespace) if is_queued else {}))
    # An installation may remove the pods of stages that have ended: a missing one was deleted only if others are there.
    return Workflow(nodes=nodes, has_all_pods=any(node["phase"] in ENDED for node in nodes))


def log(pod: str, namespace: str) -> str | None:
    """Returns the output of a pod's main container, None where Kubernetes cannot be asked or has it no longer."""
    return _ask(f"/api/v1/namespaces/{namespace}/pods/{pod}/log", container="main")


def pipeline_root(namespace: str) -> str | None:
    """Returns the address of Kubeflow's artifacts in a namespace, None where it has no setting of its own."""
    settings = _ask(f"/api/v1/namespaces/{namespace}/configmaps/kfp-launcher")
    return (json.loads(settings).get("data") or {}).get("defaultPipelineRoot") if settings else None


def _ask(path: str, **query: str) -> str | None:
    target = f"{path}?{urlencode(query)}"
    given = os.environ.get("KUBECONFIG")
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    try:
        if host and not given and os.path.exists(os.path.join(SERVICE_ACCOUNT, "token")):
            status, body = ask_api_server(host, target)
            return body if status == 200 else None
        if not (given or os.path.exists(os.path.expanduser(KUBECONFIG))):
            return None
        from kubernetes import client, config

        settings = client.Configuration()
        settings.retries = False
        config.load_kube_config(given or KUBECONFIG, client_configuration=settings)
        api = client.ApiClient(settings)
        # As text: Kubernetes' own classes change with its versions.
        answer = api.call_api(
            target,
            "GET",
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=_TIMEOUTS_S,
        )
        return str(answer.data.decode("utf-8", "replace"))
    except Exception:  # of the API, the network, TLS or the file: the source is not to be had
        return None


def _workloads(namespace: str) -> dict[str, str]:
    """Returns why Kueue has not admitted a pod, by the pod's uid; empty where it may not be asked."""
    listed = _ask(f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/workloads")
    reasons: dict[str, str] = {}
    for workload in json.loads(listed).get("items", []) if listed else ():
        conditions = {each["type"]: each for each in workload.get("status", {}).get("conditions") or []}
        told = conditions.get("QuotaReserved", {})
        if told.get("status") == "False" and told.get("message"):
            reasons |= {owner["uid"]: told["message"] for owner in workload["metadata"].get("ownerReferences") or []}
    return reasons


def _nodes(pods: list[dict[str, Any]], workloads: dict[str, str]) -> Iterator[Node]:
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status", {})
        told = metadata.get("annotations", {})
        name = told.get(f"{_PREFIX}/node-name")
        if name is None:
            continue
        phase = str(status.get("phase", ""))
        yield {
            "id": told.get(f"{_PREFIX}/node-id", metadata["name"]),
            "name": name,
            "displayName": name.rpartition(".")[2],
            "type": "Pod",
            "phase": phase,
            "message": _failed(status) if phase == "Failed" else _pending(pod, workloads) if phase == "Pending" else "",
            "startedAt": status.get("startTime") or metadata.get("creationTimestamp") or "",
            "podName": metadata["name"],
        }


def _pending(pod: dict[str, Any], workloads: dict[str, str]) -> str:
    """Returns why a pod does not start, as Argo's `getPendingReason` does; with its queue and priority class."""
    status, spec = pod.get("status", {}), pod.get("spec", {})
    priority = spec.get("priorityClassName")
    about = f" (priority class {priority})" if priority else ""
    if any(gate.get("name") == ADMISSION for gate in spec.get("schedulingGates") or []):
        queue = pod["metadata"].get("labels", {}).get(QUEUE, "")
        reason = workloads.get(pod["metadata"].get("uid", ""))
        return f"Kueue: waits for queue '{queue}'{f': {reason}' if reason else ''}{about}"
    waiting = (each.get("state", {}).get("waiting") for each in status.get("containerStatuses") or [])
    unschedulable = (each for each in status.get("conditions") or [] if each.get("reason") == "Unschedulable")
    for told in (*filter(None, waiting), *unschedulable):
        return ": ".join(filter(None, (told.get("reason"), told.get("message")))) + about
    return ""


def _failed(status: dict[str, Any]) -> str:
    """Returns why a pod failed, as Argo's `inferFailedReason` does: the stage's container before the others."""
    if status.get("message"):
        return str(status["message"])
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in sorted(containers, key=lambda each: each["name"] != "main"):
        ended = container.get("state", {}).get("terminated")
        if ended and ended.get("exitCode"):
            words = f"{container['name']}: {ended.get('reason', 'Error')} (exit code {ended['exitCode']})"
            return f"{words}: {ended['message']}" if ended.get("message") else words
    return ""
