"""The `TrainJob` of a chunk. Needs Kubeflow Trainer 2.2, which has `runtimePatches`."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from baton.recipe.base import seconds
from baton.recipe.recipe import Recipe
from baton.recipe.run import SIGNING_FOLDER
from baton.signing import KEY_FILE, SIGNED_BY
from baton.tracking import servers
from baton.tracking.servers import KUBEFLOW_RUN, kubeflow_run

Object = dict[str, Any]

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
NODE = "node"
"""Name of the job and of its container, in every torch runtime of Trainer."""
NODE_STAGE = "train-node"
"""`app.kubernetes.io/component` of the pods; network policies go by it."""
MANAGER = "baton/train-chunk"
"""Trainer asks for a name with a domain for each patch of a runtime."""
RUN_LABEL, CHUNK_LABEL = "baton/run", "baton/chunk"
LEAVE = 120
"""Seconds that a pod has between SIGTERM and its end, to save."""
LONGEST_NAME = 24
"""Letters of a run's name in the job's: pods and their service add to it, and all must fit 63."""


def owner_reference(name: str, uid: str) -> Object:
    """Returns a pod as an owner of other objects: when it is deleted, Kubernetes deletes them."""
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}


def stage_owner() -> Object | None:
    """Returns the pod of this process as Kubeflow Pipelines names it."""
    name, uid = os.environ.get("KFP_POD_NAME"), os.environ.get("KFP_POD_UID")
    return owner_reference(name, uid) if name and uid else None


def labels(run_uri: str, index: int) -> dict[str, str]:
    """Returns the labels of all jobs of a chunk, whichever attempt made them."""
    return {RUN_LABEL: hashlib.sha256(run_uri.encode()).hexdigest()[:16], CHUNK_LABEL: str(index)}


def train_job(recipe: Recipe, run_uri: str, index: int, owner: Object | None, nodes: int | None = None) -> Object:
    """Returns the job of a chunk on so many nodes, the most when left out."""
    # Run, chunk and everything it asks for make the name, so an attempt that finds it follows its predecessor's job. A
    # number of nodes that may vary is left out: the job that trains already is followed with whatever number it has.
    is_fixed = isinstance(recipe.resources.nodes, int)
    spec = _spec(recipe, run_uri, index, recipe.max_nodes if is_fixed else 0)
    digest = hashlib.sha256(json.dumps([run_uri, index, spec], sort_keys=True).encode()).hexdigest()[:8]
    spec["trainer"]["numNodes"] = nodes or recipe.max_nodes
    if kubeflow := kubeflow_run():  # not in the name: a run that is submitted again follows the job that it finds
        spec["trainer"]["env"].append({"name": KUBEFLOW_RUN, "value": kubeflow})
    named = {variable["name"] for variable in spec["trainer"]["env"]}
    reaching = [name for name in servers.ACCESS if name in os.environ and name not in named]
    spec["trainer"]["env"] += [{"name": name, "value": os.environ[name]} for name in reaching]
    run_name = run_uri.rpartition("/")[2][:LONGEST_NAME].strip("-")
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": f"baton-{run_name}-{index:03d}-{digest}",
            "labels": recipe.resources.pod_labels(recipe.name, NODE_STAGE) | labels(run_uri, index),
            "annotations": {"baton/run-uri": run_uri},
            "ownerReferences": [owner] if owner else [],
        },
        "spec": spec,
    }


def _spec(recipe: Recipe, run_uri: str, index: int, nodes: int) -> Object:
    resources = recipe.resources
    scope, _, name = resources.runtime.rpartition("/")
    asked = {"cpu": resources.cpu, "memory": resources.memory}
    plain = {name: quantity for name, quantity in asked.items() if quantity}
    limits = {**plain, **({resources.accelerator: str(resources.gpus)} if resources.gpus else {})}
    spec: Object = {
        "runtimeRef": {
            "apiGroup": GROUP,
            "kind": "ClusterTrainingRuntime" if scope else "TrainingRuntime",
            "name": name,
        },
        "trainer": {
            "image": resources.image,
            "command": ["python3", "-m", "baton.kfp.process", "train_chunk"],
            "args": [run_uri, str(index)],
            "env": _environment(recipe),
            "numNodes": nodes,
            "numProcPerNode": recipe.processes,
            "resourcesPerNode": {
                kind: values for kind, values in (("limits", limits), ("requests", dict(limits))) if values
            },
        },
        "runtimePatches": [
            {
                "manager": MANAGER,
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {
                            "replicatedJobs": [{"name": NODE, "template": {"spec": {"template": _pod(recipe)}}}],
                        }
                    }
                },
            }
        ],
    }
    if resources.deadline:
        spec["activeDeadlineSeconds"] = int(seconds(resources.deadline))
    return spec


def _environment(recipe: Recipe) -> list[Object]:
    """Returns the environment of a node; Trainer adds where it meets the others."""
    plain = {**recipe.resources.plain_env, **recipe.resources.promised_env, "BATON_EVENTS": "stdout"}
    environment: list[Object] = [{"name": name, "value": value} for name, value in plain.items()]
    for secret, variables in recipe.resources.secrets:
        for key, variable in variables.items():
            environment.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    signing = recipe.chunks.signing
    # The chunk's pod has it from the pipeline; the recipe comes from the store, where somebody may have changed it.
    if signed_by := os.environ.get(SIGNED_BY) or (signing.public_key if signing else None):
        environment.append({"name": SIGNED_BY, "value": signed_by})
    if signing and signing.secret:
        environment.append({"name": KEY_FILE, "value": signing.key_file})
    if recipe.chunks.preemption.node_taints:
        environment.append({"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    return environment


def _pod(recipe: Recipe) -> Object:
    """Returns the patch of the runtime's pods: Pod Security "restricted", and the recipe's `resources`."""
    resources = recipe.resources
    volumes: list[Object] = []
    mounts: list[dict[str, str]] = []
    if resources.shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": resources.shm}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if resources.cache_claim and recipe.store.cache_dir:
        volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": resources.cache_claim}})
        mounts.append({"name": "cache", "mountPath": recipe.store.cache_dir})
    if recipe.chunks.signing and recipe.chunks.signing.secret:
        volumes.append({"name": "signing", "secret": {"secretName": recipe.chunks.signing.secret.partition("/")[0]}})
        mounts.append({"name": "signing", "mountPath": SIGNING_FOLDER})
    port = recipe.tracking.prometheus_port
    capacity = {"baton/capacity": resources.capacity} if resources.capacity else {}
    pod_security = {"seccompProfile": {"type": "RuntimeDefault"}}
    container_security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "metadata": {
            "labels": resources.pod_labels(recipe.name, NODE_STAGE) | capacity,
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)} if port else {},
        },
        "spec": {
            "nodeSelector": resources.node_selector,
            "tolerations": [toleration.model_dump(exclude_none=True) for toleration in resources.tolerations],
            "imagePullSecrets": [{"name": resources.image_pull_secret}] if resources.image_pull_secret else [],
            "securityContext": pod_security | ({"runAsNonRoot": True} if resources.run_as_non_root else {}),
            "terminationGracePeriodSeconds": LEAVE,
            "volumes": volumes,
            "containers": [{"name": NODE, "volumeMounts": mounts, "securityContext": container_security}],
        },
    }
