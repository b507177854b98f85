"""A run on Kubeflow as a person wants to see it: its stages in order, and why one failed or does not start.

The API tells the state of each node of the Argo workflow, under the names that the compiled pipeline gives its tasks,
and no message. Messages and pods are in the workflow itself, where the endpoint serves it; what a stage has to say is
in its log.
"""

from __future__ import annotations

import datetime
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.components.shared.core import termination
from baton.components.shared.core.errors import BatonError
from baton.pipelines.kubeflow import losses
from baton.pipelines.kubeflow.api import Dag, Node, PipelineSpec, Run, Task, Workflow
from baton.pipelines.kubeflow.endpoint import Client
from baton.pipelines.kubeflow.nodes import Tasks
from baton.pipelines.kubeflow.transport import one_line

BROKEN = frozenset({"FAILED", "CANCELED"})
ENDED = BROKEN | {"SUCCEEDED", "SKIPPED"}
WAITING, UNKNOWN = "WAITING", "UNKNOWN"
FROZEN = (
    "Kubeflow's record of this run has stopped, as its workflow is larger than 1 MiB: what had not ended by then is "
    "told by the store, or unknown. Kubeflow's own page still tells."
)
OMITTED = "RUNTIME_STATE_UNSPECIFIED"
"""What the backend makes of Argo's phase for a node that will not run."""
STARTED_UNSET = 1971
"""Years before it stand for no time at all: the backend writes the beginning of 1970."""

LOST = "The machine was preempted: `baton retry` resumes from the newest checkpoint, chunks.spare does so by itself."
HINTS = (
    (r"OOMKilled", "The pod ran out of memory: raise resources.memory, or lower training.micro_batch_size."),
    (
        r"ImagePullBackOff|ErrImagePull|InvalidImageName|ErrImageNeverPull",
        "The image cannot be had: check resources.image and resources.image_pull_secret.",
    ),
    (
        r"runAsNonRoot|will run as root|PodSecurity",
        "The image runs as root, which the namespace or resources.run_as_non_root forbids.",
    ),
    (
        r"secret \S+ not found|couldn't find key",
        "A Secret is missing in the run's namespace: see resources.secret and resources.secret_env.",
    ),
    (r"exceeded quota", "The namespace's quota is used up: ask for less in resources, or wait."),
    (
        r"Unschedulable|Insufficient|didn't match|untolerated taint",
        "No node fits: check resources.gpus, cpu, memory, node_selector and tolerations.",
    ),
    (r"persistentvolumeclaim .* not found", "The volume claim is missing: see resources.cache_claim."),
    (r"exceeded its deadline|DeadlineExceeded", "Its time was over: see resources.deadline."),
    (r"pod deleted|Evicted|[Pp]reempt|NodeShutdown|node (is )?not ready|exit code (137|143)", LOST),
)
"""What a pod's message matches → what to do."""

SAID = re.compile(r"^(?:\[KFP Executor [^]]* ERROR\]:|.* ERROR baton:) (.+)$", re.MULTILINE)
"""A stage's one message in its log, as kfp's executor writes it or as Baton does."""


Place = tuple[str, Task, tuple[str, ...]]
"""Key of a task, the task, and the keys of the graphs around it."""


@dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    key: str
    """Name of the task in the compiled pipeline."""
    name: str
    """Name as the page shows it."""
    state: str
    """State of the API; `WAITING` where there is none yet, `UNKNOWN` where the record has stopped."""
    parents: tuple[str, ...] = ()
    """Keys of the graphs around it, outermost first."""
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None
    message: str | None = None
    """What Kubernetes or the stage itself says."""
    exit_code: int | None = None
    """What Baton's stage itself has ended with, where it says so."""
    pod: str | None = None
    hint: str | None = None
    component: str = ""
    """Name of its component in the compiled pipeline; empty where that is not known."""

    @property
    def path(self) -> tuple[str, ...]:
        """What tells it from every other stage: the keys of the graphs around it, and its own."""
        return (*self.parents, self.key)

    @property
    def component_name(self) -> str:
        """Name of the stage as its pods' label has it: its component's, without the numbers of its copies."""
        return re.sub(r"(-\d+)+$", "", self.component.removeprefix("comp-") or self.key)

    @property
    def seconds(self) -> float | None:
        """Seconds that it took, None where it has not ended."""
        return (self.ended - self.started).total_seconds() if self.started and self.ended else None


@dataclass(frozen=True)
class View:
    """What is known of a run on Kubeflow."""

    stages: list[Stage]
    message: str | None = None
    """What there is to say of the run as a whole."""
    is_frozen: bool = False
    """Whether the record has stopped, so that stages which had not ended then are `UNKNOWN`."""
    is_stopped: bool = False
    """Whether somebody or a deadline has ended the run."""
    has_no_word: bool = False
    """Whether the store, which could be asked, knows of no stage that has failed, where the record has stopped."""

    @property
    def is_lost(self) -> bool:
        """Whether lost pods alone ended the run: no stage has failed by itself."""
        failed = [stage for stage in self.stages if stage.state == "FAILED"]
        if self.is_frozen and not failed:
            return self.has_no_word and not self.is_stopped
        return bool(failed) and all(stage.hint == LOST for stage in failed)


def stages(client: Client, run: Run) -> list[Stage]:
    """Returns the stages of a run, in the order in which they depend on each other.

    Args:
        client: What `endpoint.connect` returned.
        run: The run as kfp's client returns it.
    """
    details = (run.run_details and run.run_details.task_details) or []
    names = {detail.display_name for detail in details}
    posted = client.specification(run)
    tasks = list(_tasks(posted.get("pipeline_spec", posted))) or [
        (key, {}, ()) for key in sorted(filter(None, names), key=_natural) if key != "root" and f"{key}-driver" in names
    ]
    known = Tasks([(key, parents) for key, _, parents in tasks], details)
    return [_stage(known, key, task, parents) for key, task, parents in tasks]


def outcome(state: str | None, stages: list[Stage]) -> str:
    """Returns what a run came to: its state in lower case, `rejected` where the gate refused the model.

    The backend calls a run that was cancelled a failed one; `explained` can tell.
    """
    if state == "SUCCEEDED" and any(x.component_name == "reject" and x.state == "SUCCEEDED" for x in stages):
        return "rejected"
    ended = {stage.state for stage in stages} & BROKEN
    if state == "FAILED" and ended == {"CANCELED"}:
        return "canceled"
    return (state or "pending").lower()


def explained(client: Client, run: Run, stages: list[Stage]) -> View:
    """Returns the stages with what is known of those that failed or cannot start; whatever is not known is left out.

    Args:
        client: What `endpoint.connect` returned.
        run: The run as kfp's client returns it.
        stages: Its stages.
    """
    try:
        workflow = client.workflow(run.run_id)
    except (BatonError, ValueError):
        workflow = {}
    status = workflow.get("status", {})
    is_cancelled = workflow.get("spec", {}).get("activeDeadlineSeconds") == 0  # how the backend ends a cancelled run
    message = f"Argo says: {one_line(status['message'])}" if status.get("message") and not is_cancelled else None
    if is_frozen(run, workflow, stages):
        is_stopped = is_cancelled or bool(re.search(r"(?i)deadline|duration", message or ""))
        return View([_since(stage, run) for stage in stages], message, is_frozen=True, is_stopped=is_stopped)
    if is_cancelled:
        stages = [replace(stage, state="CANCELED") if stage.state == "FAILED" else stage for stage in stages]
    tasks = Tasks([(stage.key, stage.parents) for stage in stages], ())
    nodes = status.get("nodes", {}).values()
    pods = [tasks.pods(stage.key, stage.parents, nodes) for stage in stages]
    told = [_explained(client, run.run_id, workflow, *both) for both in zip(stages, pods, strict=True)]
    if any(stage.state == "FAILED" and stage.hint == LOST for stage in told) and (loss := losses.ends_run(workflow)):
        message = f"{loss}. {losses.APPLY}"
    return View(told, message)


def is_frozen(run: Run, workflow: Workflow, stages: list[Stage]) -> bool:
    """Returns whether Kubeflow's record of a run has stopped: its stages stand in it as they were at some moment.

    Argo compresses the nodes of a workflow of more than 1 MiB, and Kubeflow's API server does not read them then.
    """
    if workflow.get("status", {}).get("compressedNodes"):
        return True
    return run.state in ("SUCCEEDED", "FAILED", "CANCELED") and any(s.state in ("RUNNING", "PENDING") for s in stages)


def _since(stage: Stage, run: Run) -> Stage:
    """Returns a stage of a record that has stopped: as it must have ended since, where the run tells, or as unknown."""
    if stage.state in ENDED:
        return stage
    may_be_left_out = any(parent.startswith("condition-") for parent in stage.parents)
    return replace(stage, state="SUCCEEDED" if run.state == "SUCCEEDED" and not may_be_left_out else UNKNOWN)


def _explained(client: Client, run_id: str, workflow: Workflow, stage: Stage, nodes: list[Node]) -> Stage:
    if not nodes or stage.state == "CANCELED":
        return stage
    lost = [node for node in nodes if node.get("phase") in ("Failed", "Error")]
    if stage.state == "SUCCEEDED":
        if nodes[-1].get("type") == "Skipped":
            return replace(stage, message="taken from Kubeflow's cache")
        return replace(stage, message=f"attempt {len(lost) + 1}; before: {_words(lost[-1])}") if lost else stage
    node = nodes[-1]
    if not node.get("message"):
        return stage
    state = "PENDING" if node.get("phase") == "Pending" else stage.state
    pod = _pod_name(workflow, node)
    message, code = termination.read(_words(node))
    hint = None if code else next((hint for pattern, hint in HINTS if re.search(pattern, message)), None)
    if state in BROKEN and hint is None and code is None:
        message = _said(client, run_id, pod) or message
    return replace(stage, state=state, message=message, exit_code=code, pod=pod, hint=hint)


def _words(node: Node) -> str:
    """Returns what a node says: the stage's own words where it left some at its end, else Kubernetes'."""
    return " ".join(re.sub(r"^main: Error \(exit code \d+\): ", "", node.get("message") or "lost").split())


def _said(client: Client, run_id: str, pod: str) -> str | None:
    """Returns the message that a stage ended with, from its log, or None."""
    try:
        messages = SAID.findall(client.log(run_id, pod))
    except BatonError:
        return None
    return one_line(messages[-1]) if messages else None


def _pod_name(workflow: Workflow, node: Node) -> str:
    """Returns the name of a node's pod, which Argo makes of the workflow's, the template's and a hash."""
    metadata = workflow.get("metadata", {})
    if metadata.get("annotations", {}).get("workflows.argoproj.io/pod-name-format") == "v1":
        return str(node["id"])
    return f"{metadata.get('name')}-{node.get('templateName')}-{node['id'].rpartition('-')[2]}"


def _stage(tasks: Tasks, key: str, task: Task, parents: tuple[str, ...]) -> Stage:
    detail, driver = tasks.detail(key, parents), tasks.detail(f"{key}-driver", parents)
    if (detail is None or detail.state in (None, OMITTED)) and driver is not None and driver.state == "FAILED":
        detail = driver
    name = task.get("taskInfo", {}).get("name", key)
    component = task.get("componentRef", {}).get("name", "")
    if detail is None or detail.state in (None, OMITTED):
        around = (tasks.detail(parent, parents[:depth]) for depth, parent in enumerate(parents))
        passed_by = any(graph is not None and graph.state == "SKIPPED" for graph in around)
        return Stage(key, name, "SKIPPED" if passed_by else WAITING, parents, component=component)
    error = detail.error.message if detail.error else None
    times = _time(detail.start_time), _time(detail.end_time)
    return Stage(key, name, detail.state, parents, *times, error, component=component)


def _time(value: datetime.datetime | None) -> datetime.datetime | None:
    return value if value and value.year >= STARTED_UNSET else None


def _tasks(spec: PipelineSpec) -> Iterator[Place]:
    """Yields the tasks that become pods with the graphs around each, those of inner graphs in the place of these.

    The names of a phase's tasks begin with its name, as those of its report and of older pipelines do.
    """
    components = spec.get("components", {})

    def inside(dag: Dag, parents: tuple[str, ...], phase: str) -> Iterator[Place]:
        tasks = dag.get("tasks", {})
        order = graphlib.TopologicalSorter({key: tasks[key].get("dependentTasks", []) for key in tasks})
        order.prepare()
        while order.is_active():
            ready = sorted(order.get_ready(), key=_natural)
            for key in ready:
                task = tasks[key]
                component = components.get(task.get("componentRef", {}).get("name", ""), {})
                name = task.get("taskInfo", {}).get("name", key)
                if inner := component.get("dag"):
                    begins = "start_from" in component.get("inputDefinitions", {}).get("parameters", {})
                    yield from inside(inner, (*parents, key), f"{name}: " if begins else phase)
                else:
                    yield key, {**task, "taskInfo": {"name": f"{phase}{name}"}}, parents
            order.done(*ready)

    yield from inside(spec.get("root", {}).get("dag", {}), (), "")


def _natural(text: str) -> list[tuple[int, str]]:
    """Returns a sorting key by which `chunk-10` comes after `chunk-9`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]
