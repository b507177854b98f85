"""A chunk's job on Kubernetes: created or found, followed, explained, and deleted whatever happens.

If the number of nodes may vary, the job gets the most first, and fewer if they cannot be had.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from baton import events
from baton.errors import BatonError, ProcessLostError, SkipError, UserError
from baton.events import Error
from baton.recipe.base import seconds
from baton.recipe.recipe import Recipe
from baton.runtime import RetryAttempt, backoff, retry
from baton.train.distributed import launch
from baton.train.trainjob.cluster import LAST_LINES, Cluster, NoAnswerError, NoRoomError, RankLog
from baton.train.trainjob.manifest import Object, labels, stage_owner, train_job

logger = logging.getLogger("baton")

T = TypeVar("T")
POLL = 3.0  # seconds
PATIENCE = 300.0
"""Seconds that the API server may be silent: a control plane that is upgraded takes minutes."""
IMAGE_PATIENCE = 120.0
"""Seconds that an image may be missing: registries refuse now and then, and Kubernetes asks again."""
OTHERS_LINES = 200
"""Lines to read of the log of another node than the first, if that one failed."""
LAST_LINES_WAIT = 10.0  # seconds
GONE_WAIT = 180.0
"""Seconds for a job's end after it was deleted: its pods have their grace period."""
INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation, and in newer versions label, with a pod's number."""
IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
SETTINGS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
OUT_OF_MEMORY = "OOMKilled"
KILLED = (137, 143)
"""Exit codes after SIGKILL, by the kernel or at the end of the grace period, and SIGTERM."""
LOST = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated")
TOO_MUCH = ("exceeds the limit", "exceeds the total limit", "exceeded its local")
"""Messages of an eviction for the pod's own excess."""
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
                return f"the image {status.get('image')!r} cannot be had on {_place(pod)}: {reason}. {message}".strip()
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


def failure_of(job: Object, pods: Sequence[Object], error: Error | None, tail: Sequence[str]) -> BatonError:
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
        kind = ProcessLostError if launch.is_device_broken(" ".join(tail)) else BatonError
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
                logger.warning("TrainJob %s is gone: somebody deleted it", self.name)
                return False
            self._look()
            is_complete, has_failed = condition_of(job, "Complete"), condition_of(job, "Failed")
            if (is_complete or has_failed) and self._log:
                self._log.join(LAST_LINES_WAIT)  # the last lines say whether the nodes left early
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
        is_queued = condition_of(job, "Suspended")  # which is nobody's fault
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
