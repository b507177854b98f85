"""Kubernetes for a chunk's job: its few requests, the meaning of their refusals, and the log of the first node."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from baton import events
from baton.errors import BatonError, UserError
from baton.train.distributed.preemption import SERVICE_ACCOUNT
from baton.train.trainjob.manifest import GROUP, NODE, PLURAL, VERSION, Object

if TYPE_CHECKING:
    from kubernetes.client import ApiClient
    from kubernetes.client.rest import ApiException


logger = logging.getLogger("baton")

LAST_LINES = 20
TIMEOUT = 30.0  # seconds
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""Label of a job's pods: Trainer gives its JobSet the TrainJob's name."""
NO_SUCH_KIND = ("404 page not found", "the server could not find the requested resource")
"""Beginnings of a 404's message when the kind does not exist, rather than the object."""
INSTALL = "Install Kubeflow Trainer 2.2 or newer (docs/parallel.md), or set resources.nodes to 1."
RUNTIME = "resources.runtime names the runtime; k8s/components/trainer brings the one that is named by default."
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
                remedy="Submit the run to a cluster, or set resources.nodes to 1 and resources.gpus to what is here.",
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
