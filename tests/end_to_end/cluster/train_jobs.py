"""The controllers of Kubeflow Trainer, of JobSet and of jobs, as far as a TrainJob of the torch runtime needs them.

A bare cluster has none of them. This makes of each TrainJob the pods that they would make, one per node, with the
labels, the numbers and the variables by which torch's launcher finds the others, and gives it a condition at its end.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from kubernetes import client
from kubernetes.client.rest import ApiException

GROUP = ("trainer.kubeflow.org", "v1alpha1")
PORT = 29500
INDEX = "batch.kubernetes.io/job-completion-index"


class Controller:
    """Works in one namespace, in a thread. Use as a context manager.

    Args:
        api: A client with the right to do so.
        namespace: Where.
        runtime: The TrainingRuntime, as `k8s/components/trainer` has it.
        host_network: Whether the pods share the node's network, to reach a store on the loopback device.
    """

    def __init__(self, api: Any, namespace: str, runtime: dict[str, Any], *, host_network: bool) -> None:
        self._jobs, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)
        self.namespace = namespace
        self._runtime = runtime
        self._host_network = host_network
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.failures: list[BaseException] = []

    def __enter__(self) -> Controller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.failures == []

    def _work(self) -> None:
        while not self._stop.wait(0.5):
            try:
                found = self._jobs.list_namespaced_custom_object(*GROUP, self.namespace, "trainjobs")["items"]
                for job in found:
                    self._reconcile(job)
            except ApiException as error:
                if error.status not in (404, 409):  # gone meanwhile, or made before
                    self.failures.append(error)
            except Exception as error:
                self.failures.append(error)

    def _reconcile(self, job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        if job.get("status", {}).get("conditions") or job["metadata"].get("deletionTimestamp"):
            return
        pods = self.pods(name)
        if not pods:
            for index in range(job["spec"]["trainer"]["numNodes"]):
                self._core.create_namespaced_pod(self.namespace, self._pod(job, index))
            return
        phases = [pod.status.phase for pod in pods]
        if "Failed" in phases:
            for pod in pods:
                if pod.status.phase in ("Pending", "Running"):
                    self._core.delete_namespaced_pod(pod.metadata.name, self.namespace)
            self._conclude(name, "Failed")
        elif set(phases) == {"Succeeded"}:
            self._conclude(name, "Complete")

    def pods(self, name: str) -> list[Any]:
        """Returns the pods of a job."""
        selector = f"jobset.sigs.k8s.io/jobset-name={name}"
        return list(self._core.list_namespaced_pod(self.namespace, label_selector=selector).items)

    def _conclude(self, name: str, kind: str) -> None:
        condition = {
            "type": kind,
            "status": "True",
            "reason": f"Jobs{kind}",
            "message": f"jobset {kind.lower()}",
            "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        status = {"status": {"conditions": [condition]}}
        self._jobs.patch_namespaced_custom_object_status(*GROUP, self.namespace, "trainjobs", name, status)

    def _pod(self, job: dict[str, Any], index: int) -> dict[str, Any]:
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        (replicated,) = self._runtime["spec"]["template"]["spec"]["replicatedJobs"]
        base = replicated["template"]["spec"]["template"]["spec"]
        ((patch,),) = [
            found["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
            for found in job["spec"]["runtimePatches"]
        ]
        patched = patch["template"]["spec"]["template"]
        (ours,) = patched["spec"]["containers"]
        master = "127.0.0.1" if self._host_network else f"{name}-node-0-0.{name}"
        meeting = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": master,
            "PET_MASTER_PORT": str(PORT),
        }
        container = {
            **base["containers"][0],
            **ours,
            "image": trainer["image"],
            "imagePullPolicy": "IfNotPresent",
            "command": trainer["command"],
            "args": trainer["args"],
            "env": [*trainer["env"], *({"name": key, "value": value} for key, value in meeting.items())],
            "resources": trainer["resourcesPerNode"],
        }
        labels = {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": "node",
            INDEX: str(index),
        }
        metadata = patched["metadata"]
        owner = {"apiVersion": "/".join(GROUP), "kind": "TrainJob", "name": name, "uid": job["metadata"]["uid"]}
        return {
            "metadata": {
                "name": f"{name}-node-0-{index}-{job['metadata']['uid'][:5]}",
                "labels": metadata["labels"] | labels,
                "annotations": metadata["annotations"] | {INDEX: str(index)},
                "ownerReferences": [owner | {"controller": True}],
            },
            "spec": {
                **base,
                **patched["spec"],
                "hostNetwork": self._host_network,
                "hostname": f"{name}-node-0-{index}",
                "subdomain": name,
                "containers": [container],
            },
        }
