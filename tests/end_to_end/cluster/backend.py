"""Runs compiled pipelines as pods, in the place of KFP's API server and Argo's controller, which a bare cluster lacks.

How Argo judges a pod: one that is deleted while it runs is an *Error*, one whose process ends with another code
than 0 is *Failed*. `retries` of a recipe count for one of the two, by the policy in force: `OnFailure`, Argo's own
default, or `OnError`, which KFP's manifests set for the whole installation since 2.17.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kubernetes import client, watch

from tests.end_to_end.cluster import pod_manifest
from tests.end_to_end.cluster.graph import Graph, Task, TaskFailedError
from tests.end_to_end.cluster.ml_metadata import MetadataStore

CANNOT_START = {"CreateContainerConfigError", "ErrImagePull", "ImagePullBackOff", "Unschedulable"}
MARKS = re.compile(r"^(\S+) (?:launcher: starts|.*: stage stage=.* state=(?:started|done))$", re.MULTILINE)
"""Lines of a pod's log at which its time is cut: the first process, the stage's own code, and its end."""


@dataclass
class Attempt:
    """One pod.

    Attributes:
        task: Name of its task.
        pod: Its name.
        began: `time.time()` of its creation.
        waits: Why it does not start: reason and message, the newest.
        states: Each state it was seen in, and the `time.time()` of that.
        phase: Argo's verdict: `Succeeded`, `Failed`, `Error`; empty while it is on its way.
        message: The verdict in words, as Argo puts it.
        log: What it printed, each line after its time.
        seen: `time.time()` at which the verdict was reached.
    """

    task: str
    pod: str
    began: float
    waits: tuple[str, str] | None = None
    states: list[tuple[float, client.V1Pod]] = field(default_factory=list)
    phase: str = ""
    message: str = ""
    log: str = ""
    seen: float = 0.0

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return not self.phase and bool(self.states) and self.states[-1][1].status.phase == "Running"

    def line(self) -> str:
        """Returns the pod as a line: seconds to start, to the stage's own code, in it and after it; the verdict."""
        stamps = [datetime.fromisoformat(stamp).timestamp() for stamp in MARKS.findall(self.log)]
        moments = [self.began, *(stamps if len(stamps) == 3 else [None] * 3), self.seen]
        spans = [f"{b - a:6.2f}" if a and b else f"{'–':>6}" for a, b in itertools.pairwise(moments)]
        return f"  {self.task:16} {' '.join(spans)}  {self.phase} {self.message}".rstrip()


class PipelineRun:
    """A pipeline on its way.

    Args:
        backend: What runs it.
        package: The compiled file.
        arguments: Values of its parameters.
        retry_policy: `OnFailure` or `OnError`.
        leave_out: Tasks at the end of the pipeline that are not run.
    """

    def __init__(
        self, backend: Backend, package: Path, arguments: dict[str, Any], retry_policy: str, leave_out: tuple[str, ...]
    ) -> None:
        self.backend, self.graph, self.retry_policy = backend, Graph(package), retry_policy
        if leave_out:
            self.graph.leave_out(*leave_out)
        self.place = replace(backend.place, run_id=f"{backend.namespace}-{next(backend.numbers)}")
        self.attempts: list[Attempt] = []
        self.metadata = MetadataStore(f"{self.place.root}/{self.place.run_id}")
        self._pool = ThreadPoolExecutor(1)
        self._ends: Future = self._pool.submit(self.graph.run, arguments, self._execute)

    def result(self, timeout: float = 500) -> dict[str, Any]:
        """Waits for the end and returns the outputs; raises `TaskFailedError`."""
        return self._ends.result(timeout)

    def failure(self, timeout: float = 500) -> TaskFailedError:
        """Waits for the end, which must be a failure."""
        found = self._ends.exception(timeout)
        assert isinstance(found, TaskFailedError), found
        return found

    def of(self, task: str) -> list[Attempt]:
        """Returns the attempts at a task, oldest first."""
        return [attempt for attempt in self.attempts if attempt.task == task]

    def wait_for_pod(self, task: str, step: int = 0) -> Attempt:
        """Waits until a pod of a task runs, and has logged an optimizer step."""
        found: Attempt = self._wait(lambda: next((a for a in self.of(task) if a.running), None), f"pod of {task}")
        if step:
            self._wait(lambda: f"step step={step} " in self.backend.log(found.pod), f"step {step}")
        return found

    def wait_for_end(self, attempt: Attempt) -> None:
        """Waits until there is a verdict on a pod."""
        self._wait(lambda: attempt.phase, f"end of {attempt.pod}")

    def wait_for_reason(self, task: str, reason: str) -> str:
        """Waits until a pod of a task cannot start for a reason, and returns the message."""

        def look() -> str | None:
            waits = [attempt.waits for attempt in self.of(task) if attempt.waits]
            return next((message for found, message in waits if found == reason), None)

        return str(self._wait(look, reason))

    def _wait(self, look: Callable[[], Any], what: str, timeout: float = 300) -> Any:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if found := look():
                return found
            if self._ends.done():
                raise AssertionError(f"the run ended without {what}: {self._ends.exception()}")
            time.sleep(0.05)
        raise AssertionError(f"no {what} in {timeout} s; seen: {[(a.task, a.phase, a.waits) for a in self.attempts]}")

    def _execute(self, task: Task) -> dict[str, Any]:
        execution = self.metadata.begin(task)
        pause = task.retry.backoff_duration.seconds
        for number in range(task.retry.max_retry_count + 1):
            attempt, outputs = self._attempt(task, number)
            if attempt.phase == "Succeeded":
                return self.metadata.publish(execution, task, outputs)
            if attempt.phase != {"OnFailure": "Failed", "OnError": "Error"}[self.retry_policy]:
                break
            if number < task.retry.max_retry_count:
                time.sleep(pause)
                pause *= task.retry.backoff_factor
        execution.state = "FAILED"
        raise TaskFailedError(task.name, attempt.message)

    def _attempt(self, task: Task, number: int) -> tuple[Attempt, dict[str, Any]]:
        plain = re.sub("[^a-z0-9]+", "-", task.name.lower())
        name = f"{self.place.run_id}-{plain}-{number}"
        folder = f"{self.place.root}/{self.place.run_id}/{plain}-{number}"
        told = pod_manifest.executor_input(task, self.place, folder)
        pod = pod_manifest.manifest(task, told, name, folder, self.place)
        attempt = Attempt(task.name, name, time.time())
        self.attempts.append(attempt)
        message = self.backend.run_pod(pod, attempt)
        return attempt, pod_manifest.outputs_of(task, told, message) if attempt.phase == "Succeeded" else {}


class Backend:
    """Pods in one namespace.

    Args:
        core: The API server.
        namespace: Where the pods go.
        place: Where and as whom they run, but for the run's id.
    """

    def __init__(self, core: client.CoreV1Api, namespace: str, place: pod_manifest.Place) -> None:
        self.core, self.namespace, self.place = core, namespace, place
        self.runs: list[PipelineRun] = []
        self.numbers = itertools.count(1)

    def start(
        self, package: Path, *, retry_policy: str = "OnFailure", leave_out: tuple[str, ...] = (), **arguments: Any
    ) -> PipelineRun:
        """Starts a compiled pipeline and returns it on its way; see `PipelineRun`."""
        run = PipelineRun(self, package, arguments, retry_policy, leave_out)
        self.runs.append(run)
        return run

    def table(self) -> str:
        """Returns a line for each pod there was: see `Attempt.line`, and the end of the log of each that failed."""
        head = f"  {'pod':16} {'start':>6} {'python':>6} {'stage':>6} {'end':>6}  seconds each"
        runs = ["\n".join(["", *(attempt.line() for attempt in run.attempts)]) for run in self.runs]
        logs = [attempt.log[-2000:] for run in self.runs for attempt in run.attempts if attempt.phase == "Failed"]
        return "\n".join([head, *runs, *logs])

    def delete(self, attempt: Attempt, grace: int = 30) -> None:
        """Deletes a pod, as a person, an eviction or the drain of a node does."""
        self.core.delete_namespaced_pod(attempt.pod, self.namespace, grace_period_seconds=grace)

    def run_pod(self, pod: dict[str, Any], attempt: Attempt) -> str:
        """Runs a pod to its end, judges it as Argo does, and returns its termination message."""
        self.core.create_namespaced_pod(self.namespace, pod)
        message = ""
        for kind, seen in self._states(attempt.pod):
            attempt.states.append((time.time(), seen))
            attempt.waits = _reason_to_wait(seen)
            attempt.phase, attempt.message, message = _judged(kind, seen)
            if attempt.phase:
                break
        attempt.seen = time.time()
        attempt.log = self.log(attempt.pod)
        if attempt.phase == "Failed" and (said := _last_error(attempt.log)):
            attempt.message += f": {said}"
        return message

    def _states(self, name: str) -> Iterator[tuple[str, client.V1Pod]]:
        while True:  # the server ends a watch now and then
            for event in watch.Watch().stream(
                self.core.list_namespaced_pod, self.namespace, field_selector=f"metadata.name={name}"
            ):
                yield event["type"], event["object"]

    def log(self, name: str) -> str:
        """Returns what a pod printed, each line after its time."""
        try:
            return str(self.core.read_namespaced_pod_log(name, self.namespace, container="main", timestamps=True))
        except client.ApiException:  # never started, or gone already
            return ""


def _reason_to_wait(pod: client.V1Pod) -> tuple[str, str] | None:
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            return condition.reason, condition.message
    for status in pod.status.container_statuses or []:
        if status.state.waiting and status.state.waiting.reason in CANNOT_START:
            return status.state.waiting.reason, status.state.waiting.message or ""
    return None


def _judged(kind: str, pod: client.V1Pod) -> tuple[str, str, str]:
    """Returns Argo's phase of a pod, its words, and the termination message; no phase while the pod is on its way."""
    if kind == "DELETED":
        return "Error", "pod deleted", ""
    phase = pod.status.phase
    if phase in ("Pending", "Running"):
        return ("Error", "pod deleted during operation", "") if pod.metadata.deletion_timestamp else ("", "", "")
    ended = next((s.state.terminated for s in pod.status.container_statuses or [] if s.state.terminated), None)
    if phase == "Succeeded" and ended:
        return phase, "", ended.message
    why = f"{ended.reason} (exit code {ended.exit_code})" if ended else ""
    return "Failed", pod.status.message or why, ""


def _last_error(log: str) -> str:
    lines = re.findall(r" ERROR(?:\]| baton): (.*)", log)
    return str(lines[-1]) if lines else ""
