"""Why the nodes of a job do not start, or have ended: one sentence out of what Kubernetes says in five places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.components.shared.core.errors import BatonError, LostError, SkipError, UserError
from baton.components.shared.core.events import Error
from baton.components.train_chunk.distributed import devices
from baton.components.train_chunk.trainjob.objects import Condition, Pod, Terminated, TrainJob, Warning

INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation, and in newer versions label, with a pod's number."""
IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
SETTINGS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
OUT_OF_MEMORY = "OOMKilled"
KILLED = (137, 143)
"""Exit codes of a container that got SIGKILL, by the kernel or at the end of its grace period, or SIGTERM."""
LOST = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated")
"""Reasons of a pod whose node is gone or going."""
TOO_MUCH = ("exceeds the limit", "exceeds the total limit", "exceeded its local")
"""What the message of an eviction says where the pod itself took more than it may."""
DEADLINE = "DeadlineExceeded"


def condition(job: Pod | TrainJob, kind: str) -> Condition | None:
    """Returns a condition of an object where it holds, None where it does not."""
    conditions = job["status"].get("conditions") or [] if "status" in job else []
    return next((entry for entry in conditions if entry["type"] == kind and entry["status"] == "True"), None)


def index(pod: Pod) -> int:
    """Returns the number of a node in its job."""
    metadata = pod["metadata"]
    number = (metadata.get("annotations") or {}).get(INDEX) or (metadata.get("labels") or {}).get(INDEX)
    return int(number or 0)


def is_over(job: TrainJob) -> bool:
    """Tells whether a job has ended, or is being deleted."""
    ended = condition(job, "Complete") or condition(job, "Failed")
    return bool(ended or job["metadata"].get("deletionTimestamp"))


def has_place(pod: Pod) -> bool:
    """Tells whether a pod has been given a machine."""
    return bool(pod["spec"].get("nodeName"))


def has_started(pod: Pod) -> bool:
    """Tells whether a pod runs, or has run."""
    return pod["status"].get("phase") in ("Running", "Succeeded", "Failed")


def not_starting(pods: Iterable[Pod]) -> str | None:
    """Returns why a pod will not start by itself: its image or its settings."""
    for pod in pods:
        for status in pod["status"].get("containerStatuses") or []:
            waiting = status.get("state", {}).get("waiting") or {}
            reason, message = waiting.get("reason"), waiting.get("message") or ""
            if reason in IMAGE:
                return f"the image {status.get('image')!r} cannot be had on {_place(pod)}: {reason}. {message}".strip()
            if reason in SETTINGS:
                return f"node {index(pod)} cannot be started: {reason}. {message}".strip()
    return None


def waiting_for(job: TrainJob, nodes: int, pods: Sequence[Pod], warnings: Sequence[Warning]) -> str:
    """Returns what the nodes that do not run yet wait for, as far as Kubernetes tells."""
    if suspended := condition(job, "Suspended"):
        return f"the job is suspended: {suspended.get('message', '')}"
    running = sum(map(has_started, pods))
    lines = [line for pod in pods if not has_started(pod) if (line := _unschedulable(pod))]
    lines += [f"{event['reason']}: {event['message']}" for event in warnings[-1:]] if not lines else []
    if not lines and not pods:
        lines = ["no pod was made for it, as where Kubeflow Trainer's controller does not run"]
    return f"{running} of {nodes} nodes run" + (f"; {'; '.join(dict.fromkeys(lines))}" if lines else "")


def first_failed(pods: Iterable[Pod]) -> Pod | None:
    """Returns the pod whose container ended with another code than 0 before all others, None where none has."""
    failed = [pod for pod in pods if _ended(pod).get("exitCode")]
    return min(failed, key=lambda pod: (str(_ended(pod).get("finishedAt")), index(pod)), default=None)


def failure(job: TrainJob, pods: Sequence[Pod], error: Error | None, tail: Sequence[str]) -> BatonError:
    """Returns why a job failed; a `LostError` where another job may be spared it, a `SkipError` where another job skips
    the step that this one has found.

    What befell a pod comes before what the first node said: where one is killed, the others end for want of it.

    Args:
        job: The job, as it is now.
        pods: Its pods, each as it was last seen.
        error: The event with which a node's stage failed: that of the first pod to fail, or of the first node.
        tail: The last lines of that log.
    """
    again, first = "Run again: it resumes from the newest checkpoint.", first_failed(pods)
    for pod in sorted(pods, key=lambda pod: (not _took_too_much(pod), index(pod))):
        if line := _befallen(pod):
            return (BatonError if _took_too_much(pod) else LostError)(f"{line}.", remedy=again)
    if first and _ended(first)["exitCode"] in KILLED:
        where = f"node {index(first)} ({_place(first)})"
        return LostError(f"{where} was killed, by the kernel for its memory or with its machine.", remedy=again)
    if error:
        kinds = {UserError: error.exit_code == UserError.exit_code, SkipError: error.skips, LostError: error.lost}
        return next((kind for kind, is_it in kinds.items() if is_it), BatonError)(error.message)
    if first:
        kind = LostError if devices.is_broken(" ".join(tail)) else BatonError
        last = f" Its last lines: {' | '.join(tail)}" if tail else ""
        return kind(f"node {index(first)} ({_place(first)}) ended with code {_ended(first)['exitCode']}.{last}")
    failed = condition(job, "Failed") or {}
    # Where pods have run, and none has an end: they were taken away with their machine.
    kind = LostError if any(map(has_started, pods)) and failed.get("reason") != DEADLINE else BatonError
    return kind(f"the TrainJob failed: {failed.get('reason', 'no reason given')}: {failed.get('message', '')}")


def _took_too_much(pod: Pod) -> bool:
    """Tells whether a pod was ended for what it took itself, which the next one would take, too."""
    message = pod["status"].get("message") or ""
    return _ended(pod).get("reason") == OUT_OF_MEMORY or any(words in message for words in TOO_MUCH)


def _befallen(pod: Pod) -> str | None:
    """Returns what was done to a pod, None where it ended by itself or has not."""
    status, ended = pod["status"], _ended(pod)
    node = f"node {index(pod)} ({_place(pod)})"
    if ended.get("reason") == OUT_OF_MEMORY:
        return f"{node} ran out of memory and was killed: raise resources.memory, or lower micro_batch_size"
    if status.get("reason") == "Evicted":
        return f"{node} was evicted: {status.get('message', '').rstrip('.')}"
    if disruption := condition(pod, "DisruptionTarget"):
        return f"{node} was preempted: {disruption.get('reason')}: {disruption.get('message', '').rstrip('.')}"
    if status.get("reason") in LOST or status.get("phase") == "Unknown":
        return f"{node} is lost: {status.get('message') or status.get('reason') or 'its machine does not answer'}"
    return None


def _ended(pod: Pod) -> Terminated:
    for status in pod["status"].get("containerStatuses") or []:
        for state in (status.get("state", {}), status.get("lastState", {})):
            if terminated := state.get("terminated"):
                return terminated
    return {}


def _unschedulable(pod: Pod) -> str | None:
    for entry in pod["status"].get("conditions") or []:
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return f"node {index(pod)}: {entry.get('message') or entry.get('reason')}"
    return not_starting([pod])


def _place(pod: Pod) -> str:
    return str(pod["spec"].get("nodeName") or "no machine yet")
