"""A chunk's job on Kubernetes: its `TrainJob`, created or found, followed, explained, and deleted whatever happens.

If the number of nodes may vary, the job gets the most first, and fewer if they cannot be had. Kubeflow Trainer 2.2 is
needed, for its `runtimePatches`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from baton import events
from baton.errors import BatonError, ProcessLostError, SkipError, UserError
from baton.recipe.base import seconds
from baton.recipe.recipe import Recipe
from baton.recipe.run import SIGNING_FOLDER
from baton.runtime import RetryAttempt, backoff, retry
from baton.signing import KEY_FILE, SIGNED_BY
from baton.tracking import servers
from baton.train import distributed
from baton.train.preemption import SERVICE_ACCOUNT

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from kubernetes.client.rest import ApiException

logger = logging.getLogger("baton")

Object = dict[str, Any]

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
NODE = "node"  # name of the job and of its container, in every torch runtime of Trainer
NODE_STAGE = "train-node"  # `app.kubernetes.io/component` of the pods; network policies go by it
MANAGER = "baton/train-chunk"  # Trainer asks for a name with a domain for each patch of a runtime
RUN_LABEL, CHUNK_LABEL = "baton/run", "baton/chunk"
LEAVE = 120  # seconds that a pod has between SIGTERM and its end, to save
LONGEST_NAME = 24  # letters of a run's name in the job's: pods and their service add to it, and all must fit 63


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
    if (
        kubeflow := servers.kubeflow_run()
    ):  # not in the name: a run that is submitted again follows the job that it finds
        spec["trainer"]["env"].append({"name": servers.KUBEFLOW_RUN, "value": kubeflow})
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


LAST_LINES = 20
TIMEOUT = 30.0  # seconds
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"  # label of a job's pods: Trainer gives its JobSet the TrainJob's name
# Beginnings of a 404's message when the kind does not exist, rather than the object.
NO_SUCH_KIND = ("404 page not found", "the server could not find the requested resource")
INSTALL = "Install Kubeflow Trainer 2.2 or newer (docs/guides/multi-gpu.md), or set resources.nodes to 1."
RUNTIME = "resources.runtime names the runtime; k8s/components/trainer has the default one."
RIGHTS = "Apply k8s/components/trainer, which gives the stages' account these rights."


class NoAnswerError(BatonError):
    """The API server does not answer as it should just now: ask again."""


class NoRoomError(UserError):
    """The cluster does not give a job all it asks for just now."""


class Cluster:
    """One namespace, where jobs and their pods live."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        from kubernetes import client as api

        self.namespace = namespace
        self._jobs = api.CustomObjectsApi(client)
        self._core = api.CoreV1Api(client)

    @classmethod
    def here(cls) -> Cluster:
        """Returns the cluster that this process is a pod of, as the pod's account; raises `UserError` outside one."""
        from kubernetes import client, config

        if not os.path.exists(os.path.join(SERVICE_ACCOUNT, "token")):
            raise UserError(
                "resources.nodes asks for several machines, and this is one: no pod of a cluster, or one without its "
                "account's token.",
                remedy="Submit the run to a cluster, or set resources.nodes to 1 and resources.gpus to this machine's.",
            )
        config.load_incluster_config()
        with open(os.path.join(SERVICE_ACCOUNT, "namespace"), encoding="ascii") as file:
            return cls(client.ApiClient(), file.read().strip())

    def create(self, job: Object) -> bool:
        """Creates a job; False if its name is taken. Raises `NoRoomError` where a quota does not let it in."""
        create = self._jobs.create_namespaced_custom_object
        return self._ask("create", create, *self._kind, job, expected=409) is not None

    def job(self, name: str) -> Object | None:
        return self._ask("get", self._jobs.get_namespaced_custom_object, *self._kind, name, expected=404)

    def jobs(self, labels: dict[str, str]) -> list[Object]:
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        answer = self._ask("list", self._jobs.list_namespaced_custom_object, *self._kind, label_selector=selector)
        return list(answer["items"])

    def adopt(self, name: str, owners: list[Object]) -> None:
        patch, change = self._jobs.patch_namespaced_custom_object, {"metadata": {"ownerReferences": owners}}
        self._ask("patch", patch, *self._kind, name, change, expected=404)

    def delete(self, name: str) -> bool:
        """Deletes a job and its pods; False if it is gone."""
        delete = self._jobs.delete_namespaced_custom_object
        answer = self._ask("delete", delete, *self._kind, name, propagation_policy="Background", expected=404)
        return answer is not None

    def pods(self, name: str) -> list[Object]:
        return self._list("list pods", self._core.list_namespaced_pod, label_selector=f"{JOBSET_LABEL}={name}")

    def warnings(self, job: Object) -> list[Object]:
        name, since = job["metadata"]["name"], job["metadata"].get("creationTimestamp", "")
        found = self._list("list events", self._core.list_namespaced_event, field_selector="type=Warning")
        timed = [(str(event.get("lastTimestamp") or event.get("eventTime") or ""), event) for event in found]
        # An earlier job may have had this name. Only an event's time has fractions of a second: compare without them.
        ours = [
            (time, event)
            for time, event in timed
            if event["involvedObject"].get("name", "").startswith(name) and time[:19] >= since[:19]
        ]
        return [event for _, event in sorted(ours, key=lambda pair: pair[0])]

    def tail(self, pod: str, lines: int) -> list[str]:
        read = self._core.read_namespaced_pod_log
        text = self._ask("get logs", read, pod, self.namespace, container=NODE, tail_lines=lines, expected=404)
        return (text or "").splitlines()

    def log(self, pod: str) -> Iterator[str]:
        """Yields the lines of a pod's log, each with its time in front, until the pod ends."""
        answer = self._core.read_namespaced_pod_log(
            pod, self.namespace, container=NODE, follow=True, timestamps=True, _preload_content=False
        )
        rest = b""
        with answer:
            for data in answer.stream(decode_content=True):
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        if rest:
            yield rest.decode(errors="replace")

    @property
    def _kind(self) -> tuple[str, str, str, str]:
        return GROUP, VERSION, self.namespace, PLURAL

    def _list(self, what: str, call: Callable[..., Any], **selector: Any) -> list[Object]:
        # As plain objects: the client's classes know only the fields of its version.
        answer = self._ask(what, call, self.namespace, _preload_content=False, **selector)
        return list(json.loads(answer.data)["items"])

    def _ask(
        self, what: str, call: Callable[..., Any], *arguments: object, expected: int | None = None, **options: object
    ) -> Any:
        """Returns the answer, None for the expected refusal; raises `NoAnswerError` if it may differ next time."""
        from kubernetes.client.rest import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return call(*arguments, _request_timeout=TIMEOUT, **options)
        except ApiException as error:
            message = _message(error)
            if error.status == expected and not (expected == 404 and message.startswith(NO_SUCH_KIND)):
                return None
            raise _refusal(what, error.status, message, self.namespace) from None
        except HTTPError as error:
            raise NoAnswerError(f"the API server of Kubernetes cannot be reached: {error}.") from None


def _message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.body or error.reason or "no reason given").strip()


def _refusal(what: str, status: int, message: str, namespace: str) -> BatonError:
    if status == 404:
        return UserError(
            f"resources.nodes needs Kubeflow Trainer, and this cluster has no {PLURAL}.{GROUP}/{VERSION}.",
            remedy=INSTALL,
        )
    if status == 403 and "exceeded quota" in message:
        return NoRoomError(f"the quota of namespace {namespace} is used up: {message}.", remedy="Raise it, or wait.")
    if status in (401, 403) and "admission webhook" not in message:
        subject = what if " " in what else f"{what} {PLURAL}"
        return UserError(f"the stage's account may not {subject} in {namespace}: {message}.", remedy=RIGHTS)
    if status in (400, 403, 422):
        remedy = RUNTIME if "untime" in message else "Check resources in the recipe."
        return UserError(f"Kubernetes refuses the TrainJob: {message}.", remedy=remedy)
    return NoAnswerError(f"the API server of Kubernetes answers {status} to {what}: {message}.")


class RankLog:
    """Follows the log of one pod in a thread: its events become events of this stage, other lines stay as they are."""

    def __init__(self, cluster: Cluster, pod: str, before: RankLog | None = None) -> None:
        self.pod = pod
        self.error: events.Error | None = None
        # The node left before its target. A log that broke off is followed on from its last line.
        self.partial: bool = before.partial if before else False
        self.tail: deque[str] = before.tail if before else deque(maxlen=LAST_LINES)
        self._last_time: str = before._last_time if before else ""
        self._cluster = cluster
        self._thread = threading.Thread(target=self._follow, name=f"log-{pod}", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _follow(self) -> None:
        try:
            for line in self._cluster.log(self.pod):
                time, _, text = line.partition(" ")
                if time > self._last_time:  # RFC 3339 in UTC, to the nanosecond: in order as text, too
                    self._last_time = time
                    self._pass_on(text)
        except Exception as error:  # a connection that broke, a pod that is gone: `Job` asks again
            logger.info("the log of %s broke off: %s", self.pod, str(error).splitlines()[0] if str(error) else error)

    def _pass_on(self, text: str) -> None:
        event = events.parse(text)
        if event is None:
            self.tail.append(text)
            print(text, file=sys.stderr, flush=True)
        elif isinstance(event, events.Error):
            self.error = event
        elif not isinstance(event, events.Stage):  # the stage that follows has these of its own
            self.partial = self.partial or isinstance(event, events.Partial)
            events.emit(event)


T = TypeVar("T")
POLL = 3.0  # seconds
PATIENCE = 300.0  # seconds that the API server may be silent: a control plane that is upgraded takes minutes
# Seconds that an image may be missing: registries refuse now and then, and Kubernetes asks again.
IMAGE_PATIENCE = 120.0
OTHERS_LINES = 200  # lines to read of the log of another node than the first, if that one failed
LAST_LINES_WAIT = 10.0  # seconds
GONE_WAIT = 180.0  # seconds for a job's end after it was deleted: its pods have their grace period
INDEX = "batch.kubernetes.io/job-completion-index"  # annotation, and in newer versions label, with a pod's number
IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
SETTINGS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
OUT_OF_MEMORY = "OOMKilled"
KILLED = (137, 143)  # exit codes after SIGKILL, by the kernel or at the end of the grace period, and SIGTERM
LOST = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated")
# Messages of an eviction for the pod's own excess.
TOO_MUCH = ("exceeds the limit", "exceeds the total limit", "exceeded its local")
DEADLINE = "DeadlineExceeded"


def condition_of(job: Object, kind: str) -> Object | None:
    conditions = job["status"].get("conditions") or [] if "status" in job else []
    return next((entry for entry in conditions if entry["type"] == kind and entry["status"] == "True"), None)


def node_index(pod: Object) -> int:
    metadata = pod["metadata"]
    return int((metadata.get("annotations") or {}).get(INDEX) or (metadata.get("labels") or {}).get(INDEX) or 0)


def is_over(job: Object) -> bool:
    """Tells whether a job has ended, or is being deleted."""
    ended = condition_of(job, "Complete") or condition_of(job, "Failed")
    return bool(ended or job["metadata"].get("deletionTimestamp"))


def has_started(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Running", "Succeeded", "Failed")


def not_starting(pods: Iterable[Object]) -> str | None:
    """Returns why a pod will not start by itself: its image or its settings."""
    for pod in pods:
        for status in pod["status"].get("containerStatuses") or []:
            waiting = status.get("state", {}).get("waiting") or {}
            reason, message = waiting.get("reason"), waiting.get("message") or ""
            if reason in IMAGE:
                image = status.get("image")
                return f"the image {image!r} cannot be pulled on {_place(pod)}: {reason}. {message}".strip()
            if reason in SETTINGS:
                return f"node {node_index(pod)} cannot be started: {reason}. {message}".strip()
    return None


def waiting_for(job: Object, nodes: int, pods: Sequence[Object], warnings: Sequence[Object]) -> str:
    """Returns why some nodes do not run yet, as far as Kubernetes tells."""
    if suspended := condition_of(job, "Suspended"):
        return f"the job is suspended: {suspended.get('message', '')}"
    running = sum(map(has_started, pods))
    lines = [line for pod in pods if not has_started(pod) if (line := _unschedulable(pod))]
    lines += [f"{event['reason']}: {event['message']}" for event in warnings[-1:]] if not lines else []
    if not lines and not pods:
        lines = ["no pod was made for it, as where Kubeflow Trainer's controller does not run"]
    return f"{running} of {nodes} nodes run" + (f"; {'; '.join(dict.fromkeys(lines))}" if lines else "")


def first_failed(pods: Iterable[Object]) -> Object | None:
    failed = [pod for pod in pods if _ended(pod).get("exitCode")]
    return min(failed, key=lambda pod: (str(_ended(pod).get("finishedAt")), node_index(pod)), default=None)


def failure_of(job: Object, pods: Sequence[Object], error: events.Error | None, tail: Sequence[str]) -> BatonError:
    """Returns why a job failed: `ProcessLostError` or `SkipError` where another job may do better, else `BatonError`.

    `error` and `tail` are the error and last lines of the first pod to fail, or of the first node.
    """
    # A fault inflicted on a pod goes before the first node's own words: where one is killed, the others end for want of
    # it.
    again, first = "Run again: it resumes from the newest checkpoint.", first_failed(pods)
    for pod in sorted(pods, key=lambda pod: (not _took_too_much(pod), node_index(pod))):
        if line := _befallen(pod):
            return (BatonError if _took_too_much(pod) else ProcessLostError)(f"{line}.", remedy=again)
    if first and _ended(first)["exitCode"] in KILLED:
        where = f"node {node_index(first)} ({_place(first)})"
        return ProcessLostError(f"{where} was killed, by the kernel for its memory or with its machine.", remedy=again)
    if error:
        kinds = {
            UserError: error.exit_code == UserError.exit_code,
            SkipError: error.skips,
            ProcessLostError: error.lost,
        }
        return next((kind for kind, is_it in kinds.items() if is_it), BatonError)(error.message)
    if first:
        kind = ProcessLostError if distributed.is_device_broken(" ".join(tail)) else BatonError
        last = f" Its last lines: {' | '.join(tail)}" if tail else ""
        return kind(f"node {node_index(first)} ({_place(first)}) ended with code {_ended(first)['exitCode']}.{last}")
    failed = condition_of(job, "Failed") or {}
    # Pods that ran and have no end were taken away with their machine.
    kind = ProcessLostError if any(map(has_started, pods)) and failed.get("reason") != DEADLINE else BatonError
    return kind(f"the TrainJob failed: {failed.get('reason', 'no reason given')}: {failed.get('message', '')}")


def _took_too_much(pod: Object) -> bool:
    """Tells whether a pod was ended for its own consumption, which the next one would repeat."""
    message = pod["status"].get("message") or ""
    return _ended(pod).get("reason") == OUT_OF_MEMORY or any(words in message for words in TOO_MUCH)


def _befallen(pod: Object) -> str | None:
    """Returns a fault inflicted on a pod, None where it ended by itself or has not."""
    status, ended = pod["status"], _ended(pod)
    node = f"node {node_index(pod)} ({_place(pod)})"
    if ended.get("reason") == OUT_OF_MEMORY:
        return f"{node} ran out of memory and was killed: raise resources.memory, or lower micro_batch_size"
    if status.get("reason") == "Evicted":
        return f"{node} was evicted: {status.get('message', '').rstrip('.')}"
    if disruption := condition_of(pod, "DisruptionTarget"):
        return f"{node} was preempted: {disruption.get('reason')}: {disruption.get('message', '').rstrip('.')}"
    if status.get("reason") in LOST or status.get("phase") == "Unknown":
        return f"{node} is lost: {status.get('message') or status.get('reason') or 'its machine does not answer'}"
    return None


def _ended(pod: Object) -> Object:
    for status in pod["status"].get("containerStatuses") or []:
        for state in (status.get("state", {}), status.get("lastState", {})):
            if terminated := state.get("terminated"):
                return terminated
    return {}


def _unschedulable(pod: Object) -> str | None:
    for entry in pod["status"].get("conditions") or []:
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return f"node {node_index(pod)}: {entry.get('message') or entry.get('reason')}"
    return not_starting([pod])


def _place(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "no machine yet")


def patiently(ask: Callable[[], T]) -> T:
    """Asks the API server until it answers; raises `NoAnswerError` after `PATIENCE` seconds."""
    tries = backoff(PATIENCE, pause=1.0)
    return retry(ask, NoAnswerError, tries, lambda error, _: logger.warning("%s Asking again.", error))


class Job:
    """The job of one attempt at a chunk.

    `wait` bounds the seconds until all nodes run, `patience` those without a machine or quota; without `patience`,
    `wait` alone counts, and a job that no quota lets in fails at once. `notice` tells that this stage's machine will be
    preempted.
    """

    def __init__(
        self,
        cluster: Cluster,
        document: Object,
        siblings: dict[str, str],
        *,
        wait: float,
        patience: float | None = None,
        notice: Callable[[], str | None],
    ) -> None:
        self.name = document["metadata"]["name"]
        self.nodes = document["spec"]["trainer"]["numNodes"]
        self._cluster, self._document, self._siblings = cluster, document, siblings
        self._wait, self._patience, self._notice = wait, patience, notice
        self._present: list[Object] = []
        self._pods: dict[str, Object] = {}
        self._leftover: set[str] = set()
        self._log: RankLog | None = None
        self._reason = ""
        self._waiting_since: float | None = None
        self._stuck_since: float | None = None
        self._roomless_since: float | None = None

    @property
    def left_early(self) -> bool:
        return self._log is not None and self._log.partial

    def run(self) -> bool:
        """Creates or finds the job and follows it to its end; False where this stage must go, or somebody deleted it.

        Raises:
            NoRoomError: the cluster does not give as many nodes.
            ProcessLostError: another job may be spared the failure.
            BatonError: it failed otherwise, does not start, or Kubernetes does not answer.
        """
        # First remove jobs of earlier attempts, as their nodes hold the devices that this one asks for; this very job,
        # if it still runs, is followed.
        for other in patiently(lambda: self._cluster.jobs(self._siblings)):
            name, nodes = other["metadata"]["name"], other["spec"]["trainer"]["numNodes"]
            if (name, nodes) != (self.name, self.nodes) or is_over(other):
                logger.info("TrainJob %s is of an earlier attempt: it is deleted", name)
                self._remove(name)
        created = self._create()
        try:
            # Else the end of its earlier owner, the pod of the last attempt, would end it.
            if not created and (owners := self._document["metadata"]["ownerReferences"]):
                patiently(lambda: self._cluster.adopt(self.name, owners))
            logger.info("TrainJob %s is %s, with %d node(s)", self.name, "created" if created else "found", self.nodes)
            return self._follow()
        finally:
            # On every way out. A stage that is killed deletes nothing: its job goes with the pod that owns it, or the
            # next attempt follows or deletes it.
            try:
                self._remove(self.name)
            except BatonError as error:  # hides nothing that went before
                logger.warning("TrainJob %s may still be there: %s", self.name, error)

    def _create(self) -> bool:
        """Creates the job, False if it is there; raises `NoRoomError` if no quota lets it in for too long."""

        def wait(error: NoRoomError, _: RetryAttempt) -> None:
            if self._notice():
                raise error
            self._say(error.message)

        # On a machine that is lost, pods of the job that had this name before may end late.
        before = patiently(lambda: self._cluster.pods(self.name))
        self._leftover = {pod["metadata"]["name"] for pod in before if pod["metadata"].get("deletionTimestamp")}
        tries = backoff(self._patience or 0.0, pause=POLL)
        return retry(lambda: patiently(lambda: self._cluster.create(self._document)), NoRoomError, tries, wait)

    def _follow(self) -> bool:
        while True:
            if notice := self._notice():
                logger.warning("%s: TrainJob %s is deleted; its nodes save what they have", notice, self.name)
                return False
            job = patiently(lambda: self._cluster.job(self.name))
            if job is None:
                logger.warning("TrainJob %s was deleted", self.name)
                return False
            self._look()
            is_complete, has_failed = condition_of(job, "Complete"), condition_of(job, "Failed")
            if (is_complete or has_failed) and self._log:
                self._log.join(LAST_LINES_WAIT)  # the last lines show whether the nodes stopped early
            # Nodes that left early have saved everything: a preempted machine is no failure of the chunk.
            if is_complete or (has_failed and self.left_early):
                return True
            if has_failed:
                raise self._failure(job)
            self._require_start(job)
            for _ in backoff(POLL, pause=0.1):
                if self._notice():  # little time is left then
                    break

    def _look(self) -> None:
        pods = patiently(lambda: self._cluster.pods(self.name))
        self._present = [pod for pod in pods if pod["metadata"]["name"] not in self._leftover]
        self._pods.update({pod["metadata"]["name"]: pod for pod in self._present})
        first = [pod for pod in self._pods.values() if node_index(pod) == 0 and has_started(pod)]
        if not first:
            return
        newest = max(first, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))["metadata"]["name"]
        if self._log is None or self._log.pod != newest:
            self._log = RankLog(self._cluster, newest)
        elif not self._log.is_open and self._pods[newest]["status"].get("phase") == "Running":
            self._log = RankLog(self._cluster, newest, self._log)

    def _require_start(self, job: Object) -> None:
        """Logs what the nodes wait for; raises `NoRoomError` or `UserError` once they have waited too long."""
        pods, now = self._present, time.monotonic()
        if len(pods) >= self.nodes and all(map(has_started, pods)):
            self._waiting_since = self._stuck_since = self._roomless_since = None
            return
        is_queued = condition_of(job, "Suspended")  # without any fault
        if self._waiting_since is None or is_queued:
            self._waiting_since = now
        has_room = is_queued or (len(pods) >= self.nodes and all(pod["spec"].get("nodeName") for pod in pods))
        self._roomless_since = None if has_room else self._roomless_since or now
        stuck = not_starting(pods)
        self._stuck_since = (self._stuck_since or now) if stuck else None
        if stuck and self._stuck_since and now - self._stuck_since >= IMAGE_PATIENCE:
            raise UserError(stuck, remedy="Check resources.image, resources.secret and the other names there.")
        reason = waiting_for(job, self.nodes, pods, patiently(lambda: self._cluster.warnings(job)))
        if now - self._waiting_since >= self._wait:
            raise (NoRoomError if self._roomless_since else UserError)(
                f"resources.wait_for_nodes is over, {self._wait:.0f} s: {reason}.",
                remedy="Ask for fewer or other nodes, or give them more time.",
            )
        if self._patience is not None and self._roomless_since and now - self._roomless_since >= self._patience:
            raise NoRoomError(reason)
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            logger.info("TrainJob %s: %s", self.name, reason)

    def _failure(self, job: Object) -> BatonError:
        """Returns why the job failed, by the pod that failed first: the others end for want of it."""
        self._look()  # states that came with the end
        pods = list(self._pods.values())
        error, tail = (self._log.error, list(self._log.tail)) if self._log else (None, [])
        first = first_failed(pods)
        if first and node_index(first):
            lines = patiently(lambda: self._cluster.tail(first["metadata"]["name"], OTHERS_LINES))
            errors = (event for line in lines if isinstance(event := events.parse(line), events.Error))
            error, tail = next(errors, error), lines[-LAST_LINES:]
        return failure_of(job, pods, error, tail)

    def _remove(self, name: str) -> None:
        """Deletes a job and waits until its pods are gone, as the next job's pods would find no room."""
        if not patiently(lambda: self._cluster.delete(name)):
            return
        for _ in backoff(GONE_WAIT, pause=1.0):
            if patiently(lambda: self._cluster.job(name)) is None:
                pods = patiently(lambda: self._cluster.pods(name))
                if not any(pod["status"].get("phase") in ("Pending", "Running") for pod in pods):
                    return
        logger.warning("TrainJob %s is being deleted, and not gone after %.0f s", name, GONE_WAIT)


def run_job(
    cluster: Cluster, recipe: Recipe, run_uri: str, index: int, notice: Callable[[], str | None]
) -> tuple[Job, bool]:
    """Runs the job of a chunk with the most nodes that can be had; returns it, and whether it ended by itself.

    Within a job the number of nodes stays. A job that an earlier attempt left is followed, whatever possible number it
    has.
    """
    nodes, wait, siblings = recipe.resources.nodes, seconds(recipe.resources.wait_for_nodes), labels(run_uri, index)
    counts = recipe.node_counts
    if len(counts) > 1:
        # A job that an earlier attempt left: its name does not depend on the number of nodes.
        name = train_job(recipe, run_uri, index, None)["metadata"]["name"]
        jobs = patiently(lambda: cluster.jobs(siblings))
        left = [job for job in jobs if job["metadata"]["name"] == name and not is_over(job)]
        followed = (job["spec"]["trainer"]["numNodes"] for job in left)
        counts = counts[next((counts.index(number) for number in followed if number in counts), 0) :]
    for position, number in enumerate(counts):
        fewer = counts[position + 1 :]
        patience = None if isinstance(nodes, int) else seconds(nodes.patience) if fewer else wait
        document = train_job(recipe, run_uri, index, stage_owner(), number)
        job = Job(cluster, document, siblings, wait=wait, patience=patience, notice=notice)
        try:
            return job, job.run()
        except NoRoomError as error:
            if notice():
                return job, False
            if not fewer:
                raise
            why = error.message.rstrip(".")
            events.warn(f"TrainJob {job.name}: {job.nodes} nodes could not be had ({why}); going on with {fewer[0]}")
    raise AssertionError("a recipe asks for one number of nodes at least")
